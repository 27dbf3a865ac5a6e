"""No rank waits for ever for another one in a save, and all hear of the first failure."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints.shards import Box, Piece
from lightswitch.checkpoints.writing import Ranks, together
from lightswitch.errors import LostRank, UnwrittenCheckpoint
from lightswitch.strategies.ddp import DDP
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainModel
from tests.night import at_night
from tests.pool import Pool


class Absent(PlainModel):
    """Rank 1 comes to no save."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            time.sleep(3600)


class FailsAndStalls(DDP):
    """The disk of rank 1 fails it in the second write, and in the third it takes its time."""

    def __init__(self, timeout_seconds: float = 1800, stall_seconds: float = 0) -> None:
        super().__init__(timeout_seconds=timeout_seconds)
        self.stall_seconds = stall_seconds
        self._writes = 0

    def stage(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        self._writes += 1
        staged = super().stage(tensors)
        whole = self.lightning_module.get_parameter("net.0.weight").detach().clone()
        part = whole.numel() // 2
        disk = {2: Failing, 3: Stalling}.get(self._writes, Piece) if dist.get_rank() == 1 else Piece
        piece = disk(whole.flatten().narrow(0, dist.get_rank() * part, part), whole.shape, dist.get_rank() * part)
        if isinstance(piece, Stalling):
            object.__setattr__(piece, "seconds", self.stall_seconds)
        return {**staged, "model.net.0.weight": piece}


class Failing(Piece):
    def boxes(self) -> Iterator[Box]:
        raise TypeError("no such device")


@dataclass(frozen=True)
class Stalling(Piece):
    seconds: float = 0

    def boxes(self) -> Iterator[Box]:
        time.sleep(self.seconds)
        return super().boxes()


TWO = (*PLAIN, "strategy=ddp", "run_id=mine", "trainer.max_steps=8", "callbacks.last_checkpoint.every_n_steps=2")
TWO += ("~callbacks.best_checkpoint", "global_batch_size=8")


@pytest.mark.nightly
def test_a_rank_that_does_not_come_to_a_save_is_named(train: Train) -> None:
    absent = ("model._target_=tests.engine.checkpoints.test_ranks.Absent", "trainer.strategy.timeout_seconds=45")
    run = train(*TWO, *absent, ranks=2, check=False)
    assert run.returncode == 1
    assert (
        run.err.splitlines()[0] == "the checkpoint could not be written: rank 1 did not reach the save of step_2.ckpt"
    )


def test_an_error_of_one_rank_is_the_error_of_all(pool: Pool) -> None:
    told = pool(2)(_outcome_where_rank_1, _fails)
    assert told == ["UnwrittenCheckpoint: the checkpoint could not be written: rank 1: no such device"] * 2


def test_what_rank_0_concludes_is_the_result_of_all(pool: Pool) -> None:
    assert pool(2)(_outcome_where_rank_1, _returns) == [[0, 1], [0, 1]]


def test_a_rank_that_is_late_is_named(pool: Pool) -> None:
    told = pool(3, timeout_seconds=60)(_outcome_where_rank_1, _is_late)
    assert told[0] == told[2] == "LostRank: the checkpoint could not be written: rank 1 did not write its shard"


def _outcome_where_rank_1(does: Callable[[], int]) -> Any:
    dist.init_process_group("gloo")
    group = Ranks(timeout_seconds=2).writing
    try:
        return together(group, "write its shard", does if dist.get_rank() == 1 else dist.get_rank, list)
    except (UnwrittenCheckpoint, LostRank) as error:
        return f"{type(error).__name__}: {error}"


def _fails() -> int:
    raise TypeError("no such device")


def _returns() -> int:
    return 1


def _is_late() -> int:
    time.sleep(6)
    return 1


class Killed(DDP):
    """Rank 1 is killed in its second save."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment, self._saves = moment, 0

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        self._saves += 1
        self._perhaps_die("before the ranks meet")
        super().save_checkpoint(*arguments, **named)

    def stage(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        staged = super().stage(tensors)
        self._perhaps_die("before it writes")
        is_last = (self._saves, dist.get_rank(), self.moment) == (2, 1, "while it writes")
        return {**staged, "model.dies": Dying(torch.zeros(2), torch.Size([2]), 0)} if is_last else staged

    def _perhaps_die(self, moment: str) -> None:
        if (self._saves, dist.get_rank(), moment) == (2, 1, self.moment):
            os.kill(os.getpid(), signal.SIGKILL)


class Dying(Piece):
    def boxes(self) -> Iterator[Box]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().boxes()


@pytest.mark.parametrize("moment", at_night("before the ranks meet", "before it writes", "while it writes"))
def test_a_rank_killed_in_a_save_is_named_and_what_resumes_the_run(moment: str, train: Train) -> None:
    killed = ("trainer.strategy._target_=tests.engine.checkpoints.test_ranks.Killed", "trainer.devices=2")
    run = train(*TWO, *killed, f"+trainer.strategy.moment='{moment}'", check=False)
    assert re.fullmatch(r"rank 1 of 2 on \S+ failed: process \d+ was killed by SIGKILL", run.err.splitlines()[0])
    assert re.search("^go on      .* run_id=mine$", run.out, re.MULTILINE)
    assert not (run.run_dir / "checkpoints/step_4.ckpt").exists()


@pytest.mark.nightly
def test_a_write_that_fails_on_one_rank_costs_that_checkpoint_alone_and_one_that_hangs_the_run(train: Train) -> None:
    stalling = ("trainer.strategy._target_=tests.engine.checkpoints.test_ranks.FailsAndStalls",)
    stalling += ("trainer.strategy.timeout_seconds=45", "+trainer.strategy.stall_seconds=40")
    run = train(*TWO, *stalling, ranks=2, check=False)
    told = [line for line in run.out.splitlines() if "no such device" in line]
    assert told == [
        "the checkpoint could not be written: rank 1: no such device; retrying once",
        "the checkpoint could not be written: rank 1: no such device; training continues, and earlier checkpoints are "
        "kept",
    ]
    assert run.returncode == 1
    assert run.err.splitlines()[0] == "the checkpoint could not be written: rank 1 did not write its shard"
    kept_names = sorted(path.name for path in (run.run_dir / "checkpoints").glob("*.ckpt"))
    assert kept_names == ["last.ckpt", "step_2.ckpt"]
