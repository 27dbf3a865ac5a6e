"""No rank waits for ever for another one in a save, and all hear of the first failure."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints.last import LastCheckpoints, StepBoundary
from lightswitch.checkpoints.shards import Box, Piece
from lightswitch.checkpoints.writing import Ranks
from lightswitch.errors import LostRank
from lightswitch.loop.loops import replace_loops
from lightswitch.strategies.ddp import DDP
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainData, PlainModel
from tests.night import at_night
from tests.pool import Pool


class Raises(PlainModel):
    """On rank 1, while a checkpoint is put together."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            raise RuntimeError("no room")


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
    assert run.err.splitlines()[0] == "rank 1 did not reach the save of step_2.ckpt in 15 s"


def test_without_the_watch_all_ranks_hear_at_once_of_one_that_fails_while_it_saves(pool: Pool, tmp_path: Path) -> None:
    told = pool(2, timeout_seconds=300)(_told, tmp_path)
    assert told == ["LostRank: rank 1 failed: RuntimeError: no room", "RuntimeError: no room"]


def _told(folder: Path) -> str | None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDP(), max_steps=2, logger=False, enable_progress_bar=False,
        callbacks=[StepBoundary(), LastCheckpoints(str(folder), every_n_steps=2)], enable_model_summary=False,
    )  # fmt: skip
    replace_loops(trainer)
    try:
        trainer.fit(Raises(), PlainData())
    except (LostRank, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_no_rank_is_waited_for_once_one_is_known_to_be_dead(pool: Pool) -> None:
    told = pool(2, timeout_seconds=60)(_waits_for_a_dead_rank)
    assert told == ["rank 1 did not write its shard before the run failed", None]


def _waits_for_a_dead_rank() -> str | None:
    dist.init_process_group("gloo")
    is_lost = Event()
    ranks = Ranks(timeout_seconds=300, has_lost_a_rank=is_lost)
    if dist.get_rank() == 1:
        return None
    Timer(0.1, is_lost.set).start()
    with pytest.raises(LostRank) as lost:
        ranks.writing.take("write its shard", lambda: None)
    return str(lost.value)


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
def test_a_write_that_fails_or_hangs_on_one_rank_costs_that_checkpoint_alone(train: Train) -> None:
    stalling = ("trainer.strategy._target_=tests.engine.checkpoints.test_ranks.FailsAndStalls",)
    stalling += ("trainer.strategy.timeout_seconds=45", "+trainer.strategy.stall_seconds=20")
    run = train(*TWO, *stalling, ranks=2)
    told = [line for line in run.out.splitlines() if "could not be written" in line]
    kept = "; training continues, and earlier checkpoints are kept"
    assert told == [
        "the checkpoint could not be written: rank 1: no such device; retrying once",
        f"the checkpoint could not be written: rank 1: no such device{kept}",
        f"the checkpoint could not be written: rank 1 did not write its shard in 15 s{kept}",
    ]
    kept_names = sorted(path.name for path in (run.run_dir / "checkpoints").glob("*.ckpt"))
    assert kept_names == ["last.ckpt", "step_2.ckpt", "step_8.ckpt"]
