"""What a module logs is the same at any world size, whichever rank logs it, and over a resume within an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from tests.engine.conftest import PLAIN_DATA, Finished, Train, runs_in
from tests.engine.models.language import LanguageModel
from tests.engine.plain import PlainModel
from tests.engine.tiny import LANGUAGE
from tests.night import at_night
from tests.runs import largest_difference

RUN = (
    *("model._target_=tests.engine.batches.test_metrics.LogsMuch", PLAIN_DATA, "data.samples=75", "run_id=mine"),
    *(
        "global_batch_size=12",
        "trainer.max_epochs=2",
        "trainer.accelerator=cpu",
        "trainer.log_every_n_steps=1",
    ),  # of 7 steps, the last of 3 samples
    *("callbacks.last_checkpoint.every_n_steps=4", "callbacks.last_checkpoint.keep=9"),
)
TRAINING = (
    *(
        "train/mean",
        "train/sum",
        "train/min",
        "train/max",
        "train/both_epoch",
        "train/of_9",
        "train/synced_9",
        "train/end",
    ),
    *("train/accuracy", "train/Accuracy", "train/F1", "train/highest", "train/shown"),
)
OF_STEPS = ("train/both_step", "train/largest", "train/synced", "train/total", "train/step_of_9")
OF_METRICS = ("train/accuracy", "train/Accuracy", "train/F1", "train/highest", "train/of_batches")
EVALUATION = ("val/loss", "val/both_epoch", "val/sum", "val/min", "val/of_36", "val/of_1", "val/synced_1", "val/end")


class LogsMuch(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy, self.of_batches, self.highest = MulticlassAccuracy(4), MeanMetric(), MaxMetric()
        several: dict[str, Metric] = {"Accuracy": MulticlassAccuracy(4), "F1": MulticlassF1Score(4)}
        self.several = MetricCollection(several, prefix="train/")
        self.of_samples = MulticlassAUROC(4)  # keeps them all
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, size = self.net(batch[0]), len(batch[0])
        each = nn.functional.cross_entropy(logits, batch[1], reduction="none")
        self._log("train", each, batch[2])
        self.log("train/both", each.mean(), on_step=True, on_epoch=True)
        self.log("train/largest", each.max(), reduce_fx="max")
        self.log("train/synced", each.mean(), sync_dist=True)
        self.log("train/total", each.sum(), reduce_fx="sum", sync_dist=True)
        if 9 in batch[2]:  # of one rank
            self.log("train/step_of_9", each[batch[2] == 9].sum())
        for metric in (self.train_accuracy, self.several, self.of_samples):
            metric.update(logits, batch[1])
        self.of_batches(torch.tensor(float(batch_idx)))
        self.highest(each.detach())
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True, batch_size=size)
        self.log_dict(dict(self.several), on_step=False, on_epoch=True)
        self.log("train/of_batches", self.of_batches, on_step=False, on_epoch=True)
        return each.mean()

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        each = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self._log("val", each, batch[2])
        self.log("val/loss", each.mean())
        self.log("val/both", each.mean(), on_step=True, on_epoch=True)
        self.seen.append(each.sum())

    def _log(self, stage: str, each: Tensor, indices: Tensor) -> None:
        common: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log(f"{stage}/mean", each.mean(), **common)
        for name in ("sum", "min", "max"):
            self.log(f"{stage}/{name}", getattr(torch, name)(each), reduce_fx=name, **common)
        for index in {1, 9, 36} & set(indices.tolist()):  # only the rank that has read it
            self.log(f"{stage}/of_{index}", each[indices == index].sum(), batch_size=1, **common)
            self.log(f"{stage}/synced_{index}", each[indices == index].sum(), batch_size=1, sync_dist=True, **common)

    def on_train_epoch_end(self) -> None:
        self.log("train/highest", self.highest.compute())
        self.highest.reset()
        self.of_samples.reset()
        self.log("train/end", float(self.current_epoch))
        self.log("train/shown", self.trainer.callback_metrics["train/largest"])  # as what watches a metric sees it

    def on_validation_epoch_end(self) -> None:
        seen, self.seen = torch.stack(self.seen).sum(), []
        self.log("val/end", seen, reduce_fx="sum")
        if self.trainer.is_global_zero:
            self.log("val/of_rank_0", 1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, "strategy=single")


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 3), *at_night(("deepspeed_stage_2", 2), ("ddp", 2))])
def test_what_is_logged_is_the_same_at_any_world_size(strategy: str, ranks: int, alone: Finished, train: Train) -> None:
    run = train(*RUN, f"strategy={strategy}", ranks=ranks)
    for name in (*OF_STEPS, *TRAINING, *EVALUATION):
        assert largest_difference(run, alone, name) <= 2e-6 * max(1, *alone.column(name).values()), name
    assert set(run.column("val/of_rank_0").values()) == {1.0}
    assert "val/both_step" not in run.metrics()[0], "a batch of an evaluation is no step of training"


def test_what_is_logged_is_of_all_micro_batches_each_sample_once(alone: Finished, train: Train) -> None:
    """The last step has three samples for six slices."""
    run = train(*RUN, "strategy=ddp", "micro_batch_size=2", ranks=2)
    for name in (*OF_STEPS, "train/mean", "train/min", "train/max", "train/both_epoch", "train/end"):
        assert largest_difference(run, alone, name) <= 2e-6 * max(1, *alone.column(name).values()), name


@pytest.mark.parametrize("step", [8, *at_night(4)])
def test_an_epochs_metrics_go_on_over_a_resume(step: int, alone: Finished, train: Train) -> None:
    resumed = train(*RUN, "strategy=single", f"resume={alone.run_dir}/checkpoints/step_{step}.ckpt")
    for name in OF_METRICS:
        expected = alone.column(name)
        assert resumed.column(name) == {at: value for at, value in expected.items() if at >= step}, name
    line = f"means      that self.log takes over epoch {step // 7} cover the rest of it, in which this run goes on"
    assert line in resumed.out


@pytest.mark.nightly
def test_they_go_on_over_one_resume_after_another(alone: Finished, train: Train) -> None:
    at = f"resume={alone.run_dir}/checkpoints/step_4.ckpt"
    for steps in (5, 6):
        run = train(*RUN, "strategy=single", at, f"trainer.max_steps={steps}")
        at = f"resume={run.run_dir}/checkpoints/step_{steps}.ckpt"
    resumed = train(*RUN, "strategy=single", at)
    for name in OF_METRICS:
        assert resumed.column(name) == alone.column(name), name


@pytest.mark.nightly
def test_they_go_on_under_another_strategy_and_world_size(alone: Finished, train: Train) -> None:
    stopped = train(*RUN, "strategy=ddp", "trainer.max_steps=3", ranks=3)
    resumed = train(*RUN, "strategy=fsdp", f"resume={stopped.run_dir}/checkpoints/step_3.ckpt", ranks=2)
    for name in OF_METRICS[:-1]:
        assert largest_difference(resumed, alone, name) <= 2e-6 * max(1, *alone.column(name).values()), name


class LogsOfLayers(LanguageModel):
    """Logs metrics of what all devices of a group that shares layers have read."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.mean, self.total = MeanMetric(), SumMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for metric in (self.mean, self.total):
            metric.update(batch[1].float().mean())
        self.log_dict({"train/bytes": self.mean, "train/total": self.total}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluation_loss.update(super().training_step(batch, batch_idx))


@pytest.mark.nightly
def test_they_go_on_on_devices_that_share_layers(train: Train) -> None:
    plan = "+trainer.strategy.plans.LogsOfLayers=tests.engine.models.language.tensor_parallel"
    run = (f"model._target_={__name__}.LogsOfLayers", *LANGUAGE[1:], "strategy=fsdp_tp", plan, "trainer.max_steps=6")
    run = (*run, "trainer.limit_train_batches=6", "callbacks.last_checkpoint.every_n_steps=4", "micro_batch_size=null")
    whole = train(*run, ranks=4)
    resumed = train(*run, f"resume={whole.run_dir}/checkpoints/step_4.ckpt", ranks=4)
    for name in ("train/bytes", "train/total"):
        assert resumed.column(name) == pytest.approx(whole.column(name), rel=1e-6), name


class KeepsTheBest(PlainModel):
    """Keeps the best values so far as lightning-hydra-template does, which resets them where training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.val_loss, self.lowest, self.highest = MeanMetric(), MinMetric(), MaxMetric()

    def on_train_start(self) -> None:
        for metric in (self.val_loss, self.lowest, self.highest):
            metric.reset()

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        sign = (-1) ** self.current_epoch  # so that an earlier validation is among the best
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.val_loss(sign * loss, weight=len(batch[0]))
        self.log("val/signed", self.val_loss, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        for name in ("lowest", "highest"):
            best = getattr(self, name)
            best(self.val_loss.compute())
            self.log(f"val/{name}", best.compute(), sync_dist=True)


BEST = (
    *("model._target_=tests.engine.batches.test_metrics.KeepsTheBest", PLAIN_DATA, "data.samples=36", *RUN[3:]),
    *("trainer.max_epochs=4", "callbacks.last_checkpoint.every_n_steps=1", "trainer.log_every_n_steps=1"),
)


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("best"))(*BEST, "callbacks.last_checkpoint.keep=20", "strategy=single")


@pytest.mark.parametrize(  # the start of epoch 2, and after it
    ("step", "strategy"),
    [(6, "single"), *at_night((7, "fsdp"), (7, "single"), (6, "ddp"), (6, "deepspeed_stage_2"))],
)
def test_the_best_so_far_goes_on(step: int, strategy: str, best: Finished, train: Train) -> None:
    options = {} if strategy == "single" else {"ranks": 2}
    resumed = train(*BEST, f"strategy={strategy}", f"resume={best.run_dir}/checkpoints/step_{step}.ckpt", **options)
    assert_the_best(resumed, best, step)


def assert_the_best(run: Finished, best: Finished, step: int) -> None:
    for name in ("val/lowest", "val/highest", "val/signed"):
        expected, found = best.column(name), run.column(name)
        assert {at for at in expected if at >= step} <= found.keys(), name
        assert all(abs(found[at] - expected[at]) <= 2e-6 for at in found), name
