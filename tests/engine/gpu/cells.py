"""What is run on GPUs: cells in pieces, each a process as a user starts it, and the file of their results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from tests.engine.conftest import CHECKOUT

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

    def narrowed(self, wanted: re.Pattern[str]) -> Piece:
        """Return the cells whose names have a pattern in them."""
        return replace(self, cells=[cell for cell in self.cells if wanted.search(cell.name)])


# A process


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


# Results: the file is written after each cell, so that who runs out of time goes on from there


_SAME = ("devices", "gib", "cuda", "torch")  # of machines whose results are told together


class OtherMachine(Exception):
    """Error of results that were made on another card, or with other versions."""


class Record:
    """
    Args:
        path: of the JSON file; it need not be there.
        machine: what it has to be of (`machine.described`).

    Raises:
        OtherMachine: it is of another one.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any], commit: str) -> None:
        self.path, self.commit, self._lock = path, commit, threading.Lock()
        self.content: dict[str, Any] = {"machine": dict(machine), "pieces": {}}
        if path.exists():
            self.content = json.loads(path.read_text())
            kept = self.content["machine"]
            if changed := [name for name in _SAME if kept.get(name) != machine.get(name)]:
                raise OtherMachine(
                    f"{path} holds results of another machine ({', '.join(changed)} differ); give another one by "
                    "RESULTS=, or remove it"
                )

    def results(self, piece: str) -> dict[str, Result]:
        """Return the results of a piece by the names of its cells, without those that were not run."""
        cells = self.content["pieces"].get(piece, {})
        return {name: Result(cell["found"], cell["problem"]) for name, cell in cells.items() if not cell["lacks"]}

    def put(self, piece: str, name: str, result: Result, seconds: float) -> None:
        """Keep a result, on disk as well."""
        self._write(piece, name, {**asdict(result), "lacks": "", "seconds": round(seconds, 1)})

    def put_not_run(self, piece: str, name: str, lacks: str) -> None:
        """Keep why a cell was not run."""
        self._write(piece, name, {"found": {}, "problem": "", "lacks": lacks, "seconds": 0})

    def _write(self, piece: str, name: str, cell: dict[str, Any]) -> None:
        with self._lock:
            cell |= {"date": date.today().isoformat(), "commit": self.commit}
            self.content["pieces"].setdefault(piece, {})[name] = cell
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
            os.replace(new, self.path)
