"""No rank waits for ever for another one in a save, and all hear of the first failure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints.boundary import StepBoundary
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.checkpoints.shards import Piece
from lightswitch.errors import LostRank
from lightswitch.loop.loops import replace_loops
from lightswitch.strategies.ddp import DDP
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainData, PlainModel
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
    def __get_tensor_shard__(self, index: Any) -> Tensor:
        raise TypeError("no such device")


@dataclass(frozen=True)
class Stalling(Piece):
    seconds: float = 0

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        time.sleep(self.seconds)
        return super().__get_tensor_shard__(index)


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
