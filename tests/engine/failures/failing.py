"""A model, its data and a callback that fail where and as they are told to."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.engine.plain import PlainData, PlainModel, Points

FAILING_MODEL = "model._target_=tests.engine.failures.failing.FailingModel"
FAILING_DATA = "data._target_=tests.engine.failures.failing.FailingData"

RAISED: dict[str, Callable[[], BaseException]] = {
    "raises": lambda: RuntimeError("this is the bug"),
    "refuses": lambda: ValueError("this is no batch of mine"),
    "exits": lambda: SystemExit(2),
    "is interrupted": KeyboardInterrupt,
    "raises what can't be pickled": lambda: type("Unpicklable", (RuntimeError,), {})(lambda: None),
    "lacks device memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
}


class FailingModel(PlainModel):
    """
    Args:
        how: of RAISED, or of what `fail` does otherwise; nothing by any other.
        rank: None for all.
        where: a hook; for a step, with the number of its batch.
        step_seconds: so that there is time for something to happen from outside.
    """

    def __init__(
        self, how: str, rank: int | None = 1, where: str = "training_step 2", step_seconds: float = 0, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.how, self.rank, self.where, self.step_seconds = how, rank, where, step_seconds
        if where == "__init__":
            fail(how)

    def setup(self, stage: str) -> None:
        self._perhaps_fail("setup")

    def configure_optimizers(self) -> Any:
        self._perhaps_fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._perhaps_fail("training_step", batch_idx)
        time.sleep(self.step_seconds)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._perhaps_fail("sanity_check" if self.trainer.sanity_checking else "validation_step", batch_idx)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._perhaps_fail("test_step", batch_idx)
        super().test_step(batch, batch_idx)

    def _perhaps_fail(self, *place: str | int) -> None:
        if " ".join(map(str, place)) == self.where and self.rank in (None, self.trainer.global_rank):
            fail(self.how)


class FailingPoints(Points):
    def __init__(self, samples: int, how: str) -> None:
        super().__init__(samples)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 150:
            fail(self.how)
        return super().__getitem__(index)


class FailingData(PlainData):
    """
    Args:
        where: __init__, on rank 1 alone, before it has met the others; prepare_data, setup, or sample, of those that
            are trained on.
    """

    def __init__(self, how: str, where: str = "__init__", workers: int = 0) -> None:
        super().__init__(samples=640, workers=workers)
        self.how, self.where = how, where
        here = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0
        if int(here) == 1:
            self._perhaps_fail("__init__")

    def prepare_data(self) -> None:
        self._perhaps_fail("prepare_data")

    def setup(self, stage: str) -> None:
        self._perhaps_fail("setup")

    def train_dataloader(self) -> Any:
        if self.how == "has no batches":
            return []
        points = FailingPoints(self.samples, self.how if self.where == "sample" else "nothing")
        return DataLoader(points, self.batch_size, num_workers=self.workers)

    def test_dataloader(self) -> Any:
        return None if self.how == "has no test" else super().test_dataloader()

    def _perhaps_fail(self, place: str) -> None:
        if place == self.where:
            fail(self.how)


def fail(how: str) -> None:
    Path(f"failed_{os.getpid()}").write_text(str(time.time()))  # when: for the table of failures
    if how in RAISED:
        raise RAISED[how]()
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "ends":
        os._exit(9)
    if how == "is asked to end and raises":
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("this is the bug")
    if how == "has Python raise":
        int("three")
    if how == "runs out of memory":
        run_out_of_memory()
    if how == "sees another run out of memory":
        other = multiprocessing.get_context("fork").Process(target=run_out_of_memory)
        other.start()
        other.join()
        raise RuntimeError("this is the bug")
    if how == "may write no more":  # as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if how == "hangs":
        time.sleep(1000)
    if how == "loses its run":
        for run_dir in Path("runs").glob("*/mine"):
            shutil.rmtree(run_dir)  # noqa: TID251  # its own
        raise ValueError("as TensorBoard does") from FileNotFoundError("events")
    if how == "lingers":
        atexit.register(lambda: (time.sleep(3), Path("has ended").touch()))


def run_out_of_memory() -> None:
    """Until the kernel ends this process; needs root, and the first version of control groups."""
    group = Path(f"/sys/fs/cgroup/memory/failing_{time.time_ns()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    (group / "cgroup.procs").write_text("0")  # this process, whatever its number in its namespace
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)))
