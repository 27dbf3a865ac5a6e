"""Runs of train.py as a user starts them, forked from a process that has imported torch already."""

from __future__ import annotations

import csv
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).parents[1]
PLAIN = ("model._target_=tests.plain.PlainModel", "data._target_=tests.plain.PlainData")

os.environ["OMP_NUM_THREADS"] = "1"  # a few processes share two cores; and sums in another order differ in a bit
torch.set_num_threads(1)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["lightswitch.launch.build", "lightning.pytorch", "torchmetrics.classification"])


@dataclass(frozen=True)
class Finished:
    returncode: int
    out: str
    err: str
    folder: Path  # the working directory it ran in

    @property
    def run_dir(self) -> Path:
        (found,) = self.folder.glob("runs/*/*")
        return found

    def metrics(self) -> list[dict[str, str]]:
        with (self.run_dir / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> dict[int, float]:
        """Values by step, where there are any."""
        return {int(row["step"]): float(row[name]) for row in self.metrics() if row.get(name)}


Train = Callable[..., Finished]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    return runs_in(tmp_path)


def runs_in(tmp_path: Path) -> Train:
    """`train("strategy=ddp_fork", …)` in a folder of its own; ``folder=`` runs again where an earlier one ran."""
    count = 0

    def run(*arguments: str, folder: Path | None = None, timeout_seconds: int = 200, check: bool = True) -> Finished:
        nonlocal count
        count += 1
        folder = folder or tmp_path / str(count)
        folder.mkdir(exist_ok=True)
        out, err = tmp_path / f"{count}.out", tmp_path / f"{count}.err"
        process = _context.Process(target=_train, args=(arguments, folder, out, err))
        process.start()
        process.join(timeout_seconds)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        finished = Finished(process.exitcode, out.read_text(), err.read_text(), folder)
        if check:
            assert finished.returncode == 0, f"{' '.join(arguments)}\n{finished.out}\n{finished.err}"
        return finished

    return run


def _train(arguments: tuple[str, ...], folder: Path, out: Path, err: Path) -> None:
    os.setsid()  # so that a time-out ends the processes it has started, too
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1 if stream is sys.stdout else 2)
    os.chdir(folder)
    sys.path[:0] = [str(CHECKOUT), str(folder)]
    sys.argv = [str(CHECKOUT / "train.py"), *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
