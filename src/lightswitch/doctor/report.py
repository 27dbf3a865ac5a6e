"""Report of the doctor, as rank 0 prints it.

A line is printed as soon as it is known; problems come last, so that nobody has to scroll.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightswitch.doctor.network import Measured
from lightswitch.errors import ExitCode


@dataclass
class Report:
    """Report that one process prints and the others keep to themselves.

    Attributes:
        is_first: whether this process is rank 0, which prints.
        problems: a line each, printed at the end.
    """

    is_first: bool = True
    problems: list[str] = field(default_factory=list)

    def line(self, label: str, text: str) -> None:
        """Print a label and a text in columns."""
        if self.is_first:
            print(f"{label:<11} {text}", flush=True)

    def machines(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Print what each node has, and take over its problems."""
        for one in everyone:
            for number, holding in enumerate(one["holdings"]):
                self.line(one["node"] if number == 0 else "", holding)
            if self.is_first:
                self.problems += one["problems"]

    def software(self, versions: Mapping[str, str], machine: Mapping[str, Any]) -> None:
        """Print versions, backends, operators and variables."""
        self.line("versions", ", ".join(f"{name} {value}" for name, value in versions.items()))
        self.line("backends", ", ".join(machine["backends"]))
        self.line("operators", ", ".join(machine["ops"]))
        for number, (name, value) in enumerate(machine["environment"].items()):
            self.line("" if number else "environment", f"{name}={value}")

    def bandwidth(self, backend: str, measured: Measured) -> None:
        """Print the speed of an all-reduce: µs for the smallest, GB/s for others."""
        if measured.size_bytes == 8:
            self.line("all-reduce", f"{backend}, 8 bytes: {measured.seconds * 1e6:.0f} µs")
            return
        speeds = (measured.algorithm_bandwidth / 1e9, measured.bus_bandwidth / 1e9)
        self.line("", f"{backend}, {measured.size_bytes >> 20} MiB: {speeds[0]:.2f} GB/s, bus {speeds[1]:.2f} GB/s")

    def end(self) -> int:
        """Print the problems, and return the exit code."""
        for problem in self.problems:
            print(f"problem     {problem}", flush=True)
        if not self.problems:
            self.line("", "no problem was found")
        return ExitCode.FAILED if self.problems else 0
