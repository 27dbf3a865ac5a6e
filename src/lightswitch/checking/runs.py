"""Runs of a few steps, each in a process of its own, and the export of what they save."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightswitch.checking.comparison import State, States
from lightswitch.checking.probe import FILE
from lightswitch.errors import ExitCode
from lightswitch.process import ended_by

TIMEOUT_SECONDS = 1800.0  # of one run
_OF_RANKS = re.compile(r"(SLURM_.*|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT))$")


@dataclass(frozen=True)
class ShortRun:
    """Run of a few steps that has ended.

    Attributes:
        code: exit code; negative for a signal.
        output: stdout and stderr of all ranks.
        folder: has what the probe recorded, and the run directory.
    """

    code: int
    output: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @cached_property
    def moments(self) -> list[Mapping[str, Any]]:
        """Moments that the probe has recorded, without a line that is incomplete because the run was killed."""
        path = self.folder / FILE
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    @cached_property
    def states(self) -> States:
        """States by moment."""
        found = self.moments
        return {(one["moment"][0], one["moment"][1]): State(one["digests"], one.get("draws", False)) for one in found}

    @property
    def steps(self) -> int:
        """Number of steps that it has taken."""
        return max((step for step, _ in self.states), default=0)

    @property
    def is_refused(self) -> bool:
        """True if it was refused, at the start or in its first steps."""
        return self.code == ExitCode.REFUSED

    @property
    def problem(self) -> str:
        """Line that says why the run failed."""
        failed = (
            r"^error: (.*)$",
            r"^rank \d+(?: of \d+)? on \S+ failed: (.*)$",
            r"^([\w.]*\w(?:Error|Exception)(?:: .*)?)$",
        )
        found = (re.search(pattern, self.output, re.MULTILINE) for pattern in failed)
        return next((one[1] for one in found if one), f"it {ended_by(self.code)}")


def run_script(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> ShortRun:
    """Run this process's script, which starts the other ranks; wait until it has ended, and return the result.

    Args:
        folder: folder for the output, which is created here; the words name it for the moments and the run directory.
        environment: environment variables in addition to this process's.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, os.path.abspath(sys.argv[0]), *words]
    own = {name: value for name, value in os.environ.items() if not _OF_RANKS.match(name)}
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**own, **environment}, start_new_session=True
        )
        try:
            process.wait(TIMEOUT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # usually, nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
    return ShortRun(process.wait(), output.read_text(errors="replace"), folder)


def export_problem(run_dir: Path) -> str | None:
    """Export a run's last checkpoint and load it; return the problem in one line, or None."""
    from lightswitch.checkpoints import names, weight_files
    from lightswitch.checkpoints.reading import Reader
    from lightswitch.export.models import load, model_config

    checkpoint, file = run_dir / "checkpoints" / "last.ckpt", run_dir / "exported.pt"
    if not checkpoint.exists():
        return "there is no checkpoint"
    try:
        reader = Reader(checkpoint, group=None)
        weight_files.write(reader, model_config(checkpoint, trust=True).node, file)
        found = names.state_of(load(file, trust=True))
    except Exception as error:  # the module's own code may raise any exception
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for name, tensor in reader.read_weights().items():
        if name not in found or not weight_files.same_bits(found[name].contiguous(), tensor):
            return f"{name} differs from the saved value"
    return None
