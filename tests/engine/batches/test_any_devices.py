"""A global batch that does not divide over the devices trains the run of one process."""

from __future__ import annotations

from dataclasses import replace
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
from tests.engine.fits import CLASSIFIER, TENSOR_PARALLEL, Fits, local_trainer
from tests.engine.fits import LANGUAGE as TEXTS
from tests.engine.plain import PlainData, PlainModel, Points
from tests.night import at_night
from tests.runs import largest_difference

LANGUAGE = replace(TEXTS, global_batch=16, micro_batch=None)
STRATEGIES = ("ddp", "fsdp", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))


@pytest.mark.parametrize(
    ("strategy", "global_batch", "micro_batch"),
    [
        *(("ddp", 2, None), ("fsdp", 10, 3)),
        *at_night(("deepspeed_stage_3", 16, None)),
        *at_night(*((strategy, 16, None) for strategy in STRATEGIES[:-1])),
        *at_night(*((strategy, *cut) for strategy in STRATEGIES[1:] for cut in ((10, 4), (2, None), (10, 3))))[:-1],
    ],
)
def test_three_devices_train_the_run_of_one(
    strategy: str, global_batch: int, micro_batch: int | None, fits: Fits
) -> None:
    whole = replace(LANGUAGE, global_batch=global_batch)
    (one,) = fits(whole)
    cut = replace(whole, strategy=strategy, micro_batch=micro_batch)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(fits(cut, 3)[0], one, metric) <= 1e-5, metric


@pytest.mark.nightly
def test_a_micro_batch_that_does_not_divide_is_the_most_that_a_device_takes(fits: Fits) -> None:
    for fit in (LANGUAGE, replace(CLASSIFIER, global_batch=16, micro_batch=None)):
        (one,), (cut,) = fits(fit), fits(replace(fit, micro_batch=5))
        assert largest_difference(cut, one) <= 1e-5


@pytest.mark.nightly
def test_tensor_parallel_groups_take_slices_of_two_sizes(fits: Fits) -> None:
    odd = replace(LANGUAGE, global_batch=15)
    assert largest_difference(fits(replace(odd, strategy=TENSOR_PARALLEL), 4)[0], fits(odd)[0]) <= 1e-5


# What is set on a Trainer


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
