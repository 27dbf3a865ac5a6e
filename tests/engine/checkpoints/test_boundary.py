"""A run goes on from each of its checkpoints as if it had never been interrupted: weights, hooks, rates and means."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints.last import LastCheckpoints, StepBoundary
from lightswitch.loop.loops import replace_loops
from tests.engine.fits import local_trainer
from tests.engine.plain import PlainData, PlainModel, Points
from tests.night import at_night
from tests.pool import Pool

SAMPLES, BATCH = 30, 8  # four steps an epoch, the last of six samples


class Model(PlainModel):
    """Averages its weights in a hook, logs a mean over the epoch, and steps a schedule by a metric of validation."""

    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        self.interval = interval
        self.register_buffer("average", torch.zeros(self.net[0].weight.shape))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        loss = torch.stack([super(Model, self).training_step(one, batch_idx) for one in batches]).sum()
        self.log("train/mean", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.lerp_(self.net[0].weight.detach(), 0.1)

    def on_train_epoch_end(self) -> None:
        self.average.mul_(0.9)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss", "interval": self.interval, "strict": False},
        }


class Several(PlainData):
    def train_dataloader(self) -> dict[str, DataLoader]:  # type: ignore[override]
        return {name: DataLoader(Points(SAMPLES, seed), 4, shuffle=True) for seed, name in enumerate("ab")}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        points = Points(SAMPLES)
        return (points[index] for index in range(len(points)))


class Streams(PlainData):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=4)


class SavesItself(pl.Callback):
    """Saves in the middle of a step, in a validation and at an epoch's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "in_step")

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "in_validation_after_step")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "at_end_of_epoch_after_step")

    def _save(self, trainer: pl.Trainer, when: str) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / f"{when}_{trainer.global_step}.ckpt")


class Hooks(pl.Callback):
    """Notes hooks, with the step, the rate and what was logged."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def _note(self, trainer: pl.Trainer, name: str) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "train/" not in name}
        self.seen.append((name, trainer.current_epoch, trainer.global_step, rate, logged))

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note(trainer, "epoch start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note(trainer, "batch end")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "validation end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note(trainer, "epoch end")


@dataclass(frozen=True)
class Way:
    micro_batch: int = BATCH
    data: Any = PlainData
    interval: str = "epoch"
    stops_early: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "epochs": Way(),
    "accumulation": Way(micro_batch=2),
    "two validations an epoch": Way(micro_batch=4, interval="step", arguments={"val_check_interval": 4}),
    "steps that end in mid-epoch": Way(
        arguments={"max_steps": 11, "val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "early stopping": Way(stops_early=True, arguments={"max_epochs": 9}),
    "several loaders": Way(data=Several, micro_batch=4),
    "a stream": Way(data=Streams, micro_batch=4),
}


def _run(way: Way, folder: Path, checkpoint: Path | None = None) -> tuple[dict[str, Tensor], list[tuple[Any, ...]]]:
    pl.seed_everything(1, verbose=False)
    plan = BatchPlan.derive(BATCH, way.micro_batch, 1)
    hooks, engine = Hooks(), [GlobalBatch(plan, seed=1), StepBoundary(ends_again=True)]
    best = ModelCheckpoint(folder / "best", monitor="val/loss", filename="{step}", save_top_k=-1)
    users: list[pl.Callback] = [hooks, SavesItself(folder / "own"), best]
    users += [EarlyStopping("val/loss", patience=1, min_delta=0.3)] if way.stops_early else []
    arguments = {
        "max_epochs": 3,
        "accumulate_grad_batches": plan.accumulation,
        "num_sanity_val_steps": 0,
        **way.arguments,
    }
    saves = LastCheckpoints(str(folder), every_n_steps=1 if checkpoint is None else 99, keep=99)
    trainer = local_trainer(folder, *engine, *users, saves, **arguments)
    replace_loops(trainer)
    model = Model(way.interval)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader that is not resumable, and of another folder
        trainer.fit(model, way.data(SAMPLES, batch_size=4), ckpt_path=checkpoint, weights_only=True)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, hooks.seen


PUSHED = ("steps that end in mid-epoch", "a stream", "early stopping")


@pytest.mark.parametrize("way", [*PUSHED, *at_night(*(way for way in WAYS if way not in PUSHED))])
def test_a_run_goes_on_from_its_checkpoints_to_the_bit(way: str, pool: Pool, tmp_path: Path) -> None:
    pool(1)(_goes_on, WAYS[way], tmp_path)


def _goes_on(way: Way, folder: Path) -> None:
    weights, seen = _run(way, folder / "whole")
    *saved, last = sorted((folder / "whole").glob("step_*.ckpt"), key=lambda path: int(path.stem[5:]))
    assert last.stem == f"step_{seen[-1][2]}"  # the epoch that it cuts short would end once more after it
    of_hooks = [path for name in ("best", "own") for path in sorted((folder / "whole" / name).iterdir())[:2]]
    of_hooks += [last] if way.stops_early else []
    for number, checkpoint in enumerate([*saved[::3], *of_hooks]):
        resumed, then = _run(way, folder / f"{number}", checkpoint)
        assert {name for name in weights if not torch.equal(resumed[name], weights[name])} == set(), checkpoint
        assert then == seen[len(seen) - len(then) :], checkpoint
