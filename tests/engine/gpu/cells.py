"""The smallest things that are run on GPUs: each is run once, and its result is kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Found = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How large things are: as they are meant, or so small that a CPU tries the same path.

    Attributes:
        accelerator: gpu or cpu.
        devices: how many there are, of a kind.
        is_tiny: a few cells of each piece, with models that train in seconds.
    """

    accelerator: str
    devices: int
    is_tiny: bool

    @property
    def torch_device(self) -> str:
        """Kind of device as torch names it."""
        return "cuda" if self.accelerator == "gpu" else "cpu"

    @property
    def gpus(self) -> int:
        """Number of GPUs that are used."""
        return self.devices if self.accelerator == "gpu" else 0

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Numbers of devices that a strategy is tried on."""
        return (1, 2) if self.devices > 1 else (1,)


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        found: what was seen or measured, as JSON takes it.
        problem: what is not as expected; empty where all is.
    """

    found: Found
    problem: str = ""


class Lacking(Exception):
    """Error of a cell that finds out, once it runs, that it can't be run here, and why."""


@dataclass(frozen=True)
class Cell:
    """
    Attributes:
        run: takes an empty folder, the seconds it has, and the results of the piece so far; returns the result, or
            raises Lacking.
        lacks: why it can't be run here; empty where it can.
    """

    name: str
    run: Callable[[Path, float, Mapping[str, Result]], Result]
    lacks: str = ""
    limit_seconds: float = 240.0


@dataclass(frozen=True)
class Piece:
    """
    Attributes:
        at_once: how many cells share the devices; 1 where time or memory is measured.
    """

    name: str
    cells: list[Cell] = field(default_factory=list)
    at_once: int = 1

    def narrowed(self, wanted: re.Pattern[str], at_once: int | None) -> Piece:
        """Return the cells whose names have a pattern in them, so many at once."""
        return Piece(self.name, [cell for cell in self.cells if wanted.search(cell.name)], at_once or self.at_once)
