"""A process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.engine.conftest import CHECKOUT


def train_py(*overrides: str) -> list[str]:
    """Return the command of a run."""
    return [sys.executable, str(CHECKOUT / "train.py"), *overrides]


def run(
    command: Sequence[str], folder: Path, seconds: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, on as many threads as it likes, with no code that another one has compiled.

    Args:
        folder: for what it says and compiles, and to run in where ``cwd`` is None.

    Raises:
        subprocess.TimeoutExpired: it takes longer; it is ended then, with all that it has started.
    """
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as train.py sets it for itself: threads that spin slow what runs beside
    environ |= {f"{name}_CACHE_DIR": str(folder / name) for name in ("TORCHINDUCTOR", "TRITON")}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command, cwd=cwd or folder, env=environ, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            end_children(psutil.Process(process.pid))
            process.kill()
            process.wait()
            raise
    texts = ((folder / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, code, *texts)


def end_children(process: psutil.Process) -> None:
    """Kill all that a process has started, in sessions of their own as well, and what these have started."""
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
