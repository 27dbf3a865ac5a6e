"""What is imposed on the Trainer: a batch that is cut for as many devices as there are, and exact means."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.utils.data import DataLoader

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from tests.engine.fits import local_trainer
from tests.engine.plain import PlainData, PlainModel, PlateauModel, Points


def test_a_batch_that_was_cut_for_other_devices_is_refused(tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=4), seed=0)
    trainer = local_trainer(tmp_path, batch, max_steps=1)
    with pytest.raises(Refused, match="is split for 4 devices, but Single has 1 that read different samples"):
        trainer.fit(PlainModel(), PlainData())


@pytest.mark.parametrize(
    ("name", "fraction", "steps"),
    [("limit_train_batches", 0.2, 1), ("limit_train_batches", 0.9, 2), ("val_check_interval", 0.5, 1)],
)
def test_a_fraction_that_ends_within_a_step_is_refused(name: str, fraction: float, steps: int, tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=12, micro_batch=4, replicas=1), seed=0)
    limits = {name: fraction, "accumulate_grad_batches": batch.plan.accumulation}
    trainer = local_trainer(tmp_path, batch, max_epochs=1, **limits)
    with pytest.raises(Refused, match=f"3 are a step; type a number of steps, as trainer.{name}={steps}"):
        trainer.fit(PlainModel(), PlainData(36))


class FiveBatches(PlainData):
    """Of which two make a step, and the last one by itself."""

    def train_dataloader(self) -> DataLoader:
        points = Points(20)
        return DataLoader([(points.x[at : at + 4], points.y[at : at + 4]) for at in range(0, 20, 4)], batch_size=None)


def test_a_schedule_by_steps_follows_an_epochs_last_step_of_fewer_micro_batches(tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=4, replicas=1), seed=0)
    trainer = local_trainer(tmp_path, batch, max_epochs=2, accumulate_grad_batches=2)
    model = PlainModel()
    model.configure_optimizers = partial(halving, model)
    trainer.fit(model, FiveBatches())
    assert trainer.global_step == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01


def halving(model: PlainModel) -> OptimizerLRScheduler:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.64)
    schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def test_one_process_reduces_nothing_in_double_precision(tmp_path: Path) -> None:
    """Apple's GPUs have none."""
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=1), seed=0)
    trainer = local_trainer(tmp_path, batch)
    trainer.strategy.connect(PlainModel())
    trainer.state.fn = TrainerFn.FITTING
    batch.setup(trainer, trainer.lightning_module, "fit")
    assert trainer.strategy.reduce(torch.tensor(3)).dtype == torch.int64


class ReplacesLoaders(PlainModel):
    """Makes its loaders anew when training starts, of the same datasets, as diffusion language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_train_start(self) -> None:
        combined = self.trainer.fit_loop._combined_loader
        combined.flattened = [DataLoader(one.dataset, batch_size=4, shuffle=True) for one in combined.flattened]

    def on_train_batch_start(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))


def test_loaders_that_a_module_replaces_run_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the next epoch on, as in a plain Trainer."""
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=1), seed=0)
    module = ReplacesLoaders()
    local_trainer(tmp_path, batch, max_epochs=2).fit(module, PlainData(16))
    assert module.sizes == [8, 8, 4, 4]
    (line,) = (line for line in caplog.messages if "because the module has replaced it" in line)
    assert "it sets its own batch size and order, and a resumed run restarts its epoch" in line


@pytest.mark.parametrize("frequency", [1, 2])
def test_a_schedule_that_reads_a_metric_which_is_not_there_is_refused_before_training(
    frequency: int, tmp_path: Path
) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=1), seed=0)
    trainer = local_trainer(tmp_path, batch, max_epochs=2, check_val_every_n_epoch=2)
    if frequency == 2:
        trainer.fit(PlateauModel(frequency=2), PlainData(16))
        return
    with pytest.raises(Refused, match='write "frequency": 2 beside "monitor"'):
        trainer.fit(PlateauModel(), PlainData(16))
    assert trainer.global_step == 0


def test_a_schedule_by_epochs_is_refused_where_the_first_validation_is_later(tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=1), seed=0)
    counted = {"max_steps": 6, "check_val_every_n_epoch": None, "val_check_interval": 3}
    line = "ReduceLROnPlateau reads val/loss after 2 steps, at the end of an epoch, but the first validation is after 3"
    with pytest.raises(Refused, match=line):
        local_trainer(tmp_path, batch, **counted).fit(PlateauModel(), PlainData(16))
