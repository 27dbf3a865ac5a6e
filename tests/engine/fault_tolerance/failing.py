"""A model that fails where and as it is told to, and data that does before the ranks have met."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from tests.engine.plain import PlainData, PlainModel

FAILING_MODEL = "model._target_=tests.engine.fault_tolerance.failing.FailingModel"

How = Literal[
    "raises",
    "refuses",
    "is killed",
    "runs out of memory",
    "sees another run out of memory",
    "may write no more",
    "hangs",
    "nothing",
]


class FailingModel(PlainModel):
    """
    Args:
        stage: in which of a model's hooks it happens.
        step_seconds: so that there is time for something to happen from outside.
    """

    def __init__(
        self, how: How, rank: int = 1, stage: str = "training_step", step_seconds: float = 0, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.how, self.rank, self.stage, self.step_seconds = how, rank, stage, step_seconds

    def setup(self, stage: str) -> None:
        self._perhaps_fail("setup", 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._perhaps_fail("training_step", batch_idx)
        time.sleep(self.step_seconds)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._perhaps_fail("test_step", batch_idx + 2)
        super().test_step(batch, batch_idx)

    def _perhaps_fail(self, stage: str, batch_idx: int) -> None:
        if (self.stage, batch_idx, self.trainer.global_rank) == (stage, 2, self.rank):
            fail(self.how)


class FailingData(PlainData):
    """Fails in a rank when it is made: before that one has met the others."""

    def __init__(self, how: How, rank: int = 1) -> None:
        super().__init__()
        here = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0
        if int(here) == rank:
            fail(how)


def fail(how: How) -> None:
    Path(f"failed_{os.getpid()}").write_text(str(time.time()))  # when: for the table of failures
    if how == "raises":
        raise RuntimeError("this is the bug")
    if how == "refuses":
        raise ValueError("this is no batch of mine")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
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


def run_out_of_memory() -> None:
    """Until the kernel ends this process; needs root, and the first version of control groups."""
    group = Path(f"/sys/fs/cgroup/memory/failing_{time.time_ns()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    (group / "cgroup.procs").write_text("0")  # this process, whatever its number in its namespace
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)))
