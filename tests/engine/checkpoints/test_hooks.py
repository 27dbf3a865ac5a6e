"""What a module's and a callback's own hooks change is in a checkpoint of their step, once, wherever a run is ended."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from lightswitch.checkpoints.directory import read_state
from tests.engine.conftest import PLAIN_DATA, Finished, Train, once
from tests.engine.plain import AveragedModel, PlainModel
from tests.engine.tiny import RECORD
from tests.night import at_night
from tests.runs import largest_difference

HERE = "tests.engine.checkpoints.test_hooks"
RUN = (
    *(f"model._target_={HERE}.LateModel", f"callbacks.count._target_={HERE}.CountEpochs", PLAIN_DATA, *RECORD),
    *("data.samples=40", "global_batch_size=8", "trainer.val_check_interval=5", "trainer.accelerator=cpu"),
    *("callbacks.last_checkpoint.every_n_steps=1", "callbacks.last_checkpoint.keep=20", "run_id=mine"),
)
END = "trainer.max_steps=13"  # of five steps an epoch


class LateModel(AveragedModel):
    """Averages its weights at a batch's end, counts epochs where they begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.begun += 1

    def on_train_epoch_end(self) -> None:
        self.ended += 1


class WholeModel(PlainModel):
    """Goes by what an epoch's end tells: a schedule of a metric, means over the epoch, and a count over the run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ended", torch.zeros(()))
        self.train_accuracy, self.seen = MulticlassAccuracy(4, average="micro"), SumMetric()
        self.several = MetricCollection({"train/f1": MulticlassF1Score(4), "train/precision": MulticlassPrecision(4)})

    def on_train_start(self) -> None:
        self.seen.reset()  # as lightning-hydra-template does after the sanity check

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/mean", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("train/synced", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]), sync_dist=True)
        logits = self.net(batch[0])
        for metric in (self.train_accuracy, self.several):
            metric.update(logits, batch[1])
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log_dict(dict(self.several), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.update(len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("val/seen", self.seen.compute())

    def on_train_epoch_end(self) -> None:
        self.ended += 1
        self.log("train/end", float(self.current_epoch))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


class Dies(pl.Callback):
    """Ends its process as a power cut does, once what was saved is on disk."""

    def __init__(self, step: int | None, hook: str) -> None:
        self.step = step
        setattr(self, hook, self._die)

    def _die(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.finish_saving()
            os._exit(9)


class IsAskedToEnd(Dies):
    """Is sent a signal, as by a scheduler, once the step's first validation batch is done."""

    def _die(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class CountEpochs(pl.Callback):
    def __init__(self) -> None:
        self.ended = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = state_dict["ended"]


uninterrupted = once(*RUN, END)


def test_each_hook_is_counted_once(uninterrupted: Finished) -> None:
    """In mid-epoch a run's end is no epoch's, to whoever goes on from its last checkpoint."""
    saved = uninterrupted.run_dir / "checkpoints/step_13.ckpt"
    assert read_state(saved)["callbacks"]["CountEpochs"] == {"ended": 2}
    weights = torch.load(uninterrupted.run_dir / "weights_0.pt")
    assert (weights["begun"], weights["ended"]) == (3, 3)


WHOLE = (
    *(f"model._target_={HERE}.WholeModel", f"callbacks.count._target_={HERE}.CountEpochs", PLAIN_DATA, *RECORD),
    *("data.samples=57", "global_batch_size=12", "micro_batch_size=2", "trainer.accelerator=cpu", "run_id=mine"),
    *("trainer.max_epochs=4", "trainer.log_every_n_steps=1", "callbacks.last_checkpoint.every_n_steps=1"),
    *("callbacks.early._target_=lightning.pytorch.callbacks.EarlyStopping", "callbacks.early.monitor=val/loss"),
)
AT_ENDS = ("samples", "train/loss", "train/accuracy", "train/f1", "train/precision")
AT_ENDS += ("train/end", "val/loss", "val/accuracy", "val/seen")


whole = once(*WHOLE)


@pytest.mark.parametrize(
    ("hook", "step", "strategy", "ranks"),
    [
        *(("on_train_epoch_end", 10, "ddp", 2), ("on_train_epoch_start", 10, "single", 0)),
        *at_night(("on_validation_start", 10, "fsdp", 3)),
        *at_night(("on_validation_start", 10, "single", 0), ("on_train_epoch_end", 20, "single", 0)),
        *at_night(("on_validation_start", 20, "ddp", 2), ("on_train_epoch_end", 20, "deepspeed_stage_2", 2)),
    ],
)
def test_an_epoch_whose_end_was_cut_off_ends_in_the_run_that_goes_on(
    hook: str, step: int, strategy: str, ranks: int, whole: Finished, train: Train
) -> None:
    """In or after its validation, of any but the first epoch: hooks, schedules by a metric, means, early stopping."""
    dies = (f"callbacks.dies._target_={HERE}.Dies", f"callbacks.dies.hook={hook}")
    cut_off = train(*WHOLE, *dies, f"callbacks.dies.step={step}", check=False)
    assert cut_off.returncode == 9, cut_off.err
    run = (*WHOLE, *dies, "callbacks.dies.step=null", f"strategy={strategy}")
    gone_on = train(*run, folder=cut_off.folder, ranks=ranks)

    for name in AT_ENDS:
        assert largest_difference(gone_on, whole, name) <= 1e-6 * max(1, *whole.column(name).values()), name
    assert ended(gone_on) == ended(whole)


def test_a_validation_that_is_preempted_counts_once(whole: Finished, train: Train) -> None:
    asked = (f"callbacks.asked._target_={HERE}.IsAskedToEnd", "callbacks.asked.hook=on_validation_batch_end")
    run = (*WHOLE, *asked, "callbacks.last_checkpoint.every_n_steps=100", "data.batch_size=8")
    preempted = train(*run, "callbacks.asked.step=10", check=False)
    assert preempted.returncode == 143, preempted.err
    gone_on = train(*run, "callbacks.asked.step=null", folder=preempted.folder)
    for name in AT_ENDS:
        assert largest_difference(gone_on, whole, name) <= 1e-6 * max(1, *whole.column(name).values()), name


def ended(run: Finished) -> dict[str, Any]:
    """What hooks at epochs' ends have made of a run."""
    state = read_state(run.run_dir / "checkpoints/last.ckpt")
    (early,) = (saved for name, saved in state["callbacks"].items() if name.startswith("EarlyStopping"))
    (schedule,) = state["lr_schedulers"]
    return {
        "callback": state["callbacks"]["CountEpochs"]["ended"],
        "module": torch.load(run.run_dir / "weights_0.pt")["ended"].item(),
        "early": (early["wait_count"], round(early["best_score"].item(), 5)),
        "schedule": (schedule["num_bad_epochs"], schedule["_last_lr"]),
    }


class DrawsAtStart(PlainModel):
    """Draws its weights when training starts, as rectools' transformers do."""

    def on_train_start(self) -> None:
        for parameter in self.net.parameters():
            if parameter.dim() > 1:
                torch.nn.init.xavier_normal_(parameter.data)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("fsdp", 2), *at_night(("single", 0), ("ddp", 3))],
)
def test_a_resumed_run_whose_hooks_set_weights_again_is_refused(strategy: str, ranks: int, train: Train) -> None:
    run = (f"model._target_={HERE}.DrawsAtStart", PLAIN_DATA, "trainer.accelerator=cpu", "trainer.max_steps=5")
    run = (*run, "callbacks.last_checkpoint.every_n_steps=2", "callbacks.last_checkpoint.keep=9")
    run = (*run, "trainer.log_every_n_steps=1")
    whole = train(*run, "strategy=single")
    assert "on_train_start has set" not in whole.out + whole.err
    step_2 = f"resume={whole.run_dir}/checkpoints/step_2.ckpt"
    refused = train(*run, f"strategy={strategy}", step_2, ranks=ranks, check=False)
    assert refused.returncode == 2, refused.err
    assert "on_train_start has set net.0.weight, net.3.weight, but the run is resumed" in refused.err
