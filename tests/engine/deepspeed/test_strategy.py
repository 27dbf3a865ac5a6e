"""Under DeepSpeed, a run is the run of one process."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightswitch.checkpoints.reading import Reader
from lightswitch.deepspeed import state as zero_state
from lightswitch.errors import Refused
from tests.engine.conftest import Finished, Train
from tests.engine.fits import CLASSIFIER, LANGUAGE, PLAIN, Fits
from tests.engine.plain import PlainModel, UsedByRank0
from tests.engine.strategies import writing
from tests.engine.strategies.test_writes import saved
from tests.engine.tiny import NO_CHECKPOINTS, PICTURES
from tests.night import at_night
from tests.pool import Pool, RankFailed
from tests.runs import largest_difference

pytest.importorskip("deepspeed")

STAGES = ("1", "1_offload", "2", "2_offload", "3", "3_offload")
UNEVEN = replace(PLAIN, micro_batch=3, steps=10)  # of nine an epoch, the last of fewer samples
FITS = {"language": LANGUAGE, "classifier": CLASSIFIER, "uneven batches": UNEVEN}
CASES = [*(("language", stage) for stage in ("1", "2", "3", "3_offload")), ("uneven batches", "3")]
CASES += at_night(("language", "1_offload"), ("language", "2_offload"), ("classifier", "3"))  # in tours


@pytest.mark.parametrize(("model", "stage"), CASES)
def test_losses_are_those_of_one_process(model: str, stage: str, fits: Fits) -> None:
    (alone,), sharded = fits(FITS[model]), fits(replace(FITS[model], strategy=f"deepspeed_stage_{stage}"), 2)
    for metric in ("train/loss", "val/loss", "test/loss", "samples"):
        assert largest_difference(sharded[0], alone, metric) <= 1e-5, metric
    for held in (rank.held for rank in sharded):
        padding = 32  # an element a parameter, and a few a group
        part = held["whole"] / 2 if stage.startswith("3") else held["whole"]
        assert held["parameters"] == pytest.approx(part, abs=padding)
        assert held["optimizer"] == pytest.approx(held["trained"], abs=2 * padding)  # two states, over two ranks


class StepsItself(PlainModel):
    """Calls its closure before the step, and has a copy of its weights that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = deepcopy(self.net)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 0.05)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_module_may_step_itself_and_hold_what_it_does_not_step(stage: str, fits: Fits) -> None:
    own = replace(PLAIN, module=StepsItself)
    (alone,), run = fits(own), fits(replace(own, strategy=f"deepspeed_stage_{stage}"), 2)[0]
    assert largest_difference(run, alone) <= 1e-5


@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_parameter_that_one_rank_alone_uses_is_named(stage: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, module=partial(UsedByRank0, 1), strategy=f"deepspeed_stage_{stage}", steps=5), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith("scale took part in the loss of one of the ranks 0 and 1, but not of ")


class Counting(torch.optim.NAdam):
    """Counts the updates of each element, and masks some, beside a number of the whole group (`mu_product`)."""

    def step(self, closure: Any = None) -> Any:
        output = super().step(closure)
        stepped = (one for group in self.param_groups for one in group["params"] if one.grad is not None)
        for parameter, state in ((one, self.state[one]) for one in stepped):
            state["count"] = state.get("count", torch.zeros_like(parameter, dtype=torch.long)) + 1
            state["mask"] = parameter > 0
        return output


class Counted(PlainModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Counting(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("stage", ["1", "3"])
def test_states_keep_their_dtypes_over_a_resume(stage: str, fits: Fits, pool: Pool, tmp_path: Path) -> None:
    own = replace(PLAIN, module=Counted, micro_batch=None, steps=6)
    sharded = replace(own, strategy=f"deepspeed_stage_{stage}", arguments=f"default_root_dir={tmp_path}")
    pool(2)(saved, replace(sharded, steps=3), tmp_path)
    resumed = pool(2)(saved, sharded, tmp_path, tmp_path / "step_3.ckpt")[0]
    losses = fits(own)[0].column("train/loss")
    assert resumed == pytest.approx({step: losses[step] for step in (3, 4, 5)}, abs=1e-5)
    reader = Reader(tmp_path / "step_6.ckpt", None)
    count, mask = (reader.read(f"optimizer.0.net.0.weight.{key}") for key in ("count", "mask"))
    assert (count.unique().tolist(), count.dtype, mask.dtype) == ([6], torch.long, torch.bool)


class StepsApart(pl.Callback):
    """Puts states into the engine of which one parameter's is a step behind, as where a step has not used it."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        steps = {name: {"step": torch.tensor(float(name != "net.3.bias"))} for name, _ in module.named_parameters()}
        zero_state.scatter_states(trainer.strategy.model, module, steps.__getitem__)


def test_steps_that_differ_in_a_group_are_refused(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, strategy="deepspeed_stage_2", callbacks=(StepsApart,)))
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(
        "net.3.bias was trained in 0 steps and net.0.weight, in the same parameter"
    )


class Unfreezing(PlainModel):
    """Trains its last layer from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[3].requires_grad_(self.global_step > 1)


def test_what_is_trained_is_refused_where_it_changes(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, module=Unfreezing, strategy="deepspeed_stage_2"))
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error) == (
        "requires_grad of net.3.weight, net.3.bias has changed since the run began (step 0), but DeepSpeed trains the "
        "parameters that require gradients when it is set up; set it in the module's constructor, or use strategy=fsdp"
    )


WHOLE_AT_NO_SIZE = "config.zero_optimization.stage=3 config.zero_optimization.stage3_param_persistence_threshold=0"
_STEPPED = ", but DeepSpeed keeps another copy of the weights, with which it overwrites them after each step; use "
_STEPPED += "strategy=fsdp or ddp"
_SHARD = ", of which DeepSpeed's stage 3 holds a shard on each rank; use strategy=fsdp, or strategy=deepspeed_stage_2 "
_SHARD += "to read it"
_TEACHER = "teacher.0.bias, teacher.0.weight, teacher.3.bias and 1 more parameters"
LOST = {  # by idiom and stage
    "Clamped-2": f"on_train_batch_end of Clamped writes net.0.bias, net.0.weight{_STEPPED}",
    "ClippedByHand-2": f"training_step of ClippedByHand writes net.0.bias, net.0.weight{_STEPPED}",
    "Normalized-2": "training_step of Normalized writes net.1.s",
    "Normalized-3": "training_step of Normalized writes net.1.s",
    "AtBatchStart-3": f"on_train_batch_start of AtBatchStart accesses teacher.0.weight{_SHARD}",
    "InTrainingStep-3": f"training_step of InTrainingStep accesses teacher.0.weight{_SHARD}",
    "InOptimizerStep-3": f"optimizer_step of InOptimizerStep writes {_TEACHER}{_STEPPED}",
    "BoundedEmbedding-1": f"training_step of BoundedEmbedding writes rows.weight{_STEPPED}",
}


@pytest.mark.parametrize("cell", [*LOST, "Shrinks-1"])
def test_an_access_that_would_be_lost_is_refused_by_name(cell: str, fits: Fits) -> None:
    idiom, _, stage = cell.partition("-")
    callbacks = (partial(writing.Shrinks, "on_train_epoch_end"),) if idiom == "Shrinks" else ()
    module = PlainModel if callbacks else getattr(writing, idiom)
    strategy = f"deepspeed_stage_{stage}" + (f" {WHOLE_AT_NO_SIZE}" if cell == "Normalized-3" else "")
    fit = replace(PLAIN, module=module, strategy=strategy, callbacks=callbacks, micro_batch=None, steps=12)
    with pytest.raises(RankFailed) as failed:
        fits(replace(fit, arguments="gradient_clip_val=null"), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(LOST.get(cell, "on_train_epoch_end of Shrinks writes net."))


ON_GPU = (
    *NO_CHECKPOINTS,
    "trainer.accelerator=gpu",
    "global_batch_size=16",
    "micro_batch_size=4",
    "trainer.max_steps=4",
)
ON_GPU += ("trainer.val_check_interval=4", "trainer.limit_val_batches=4", "trainer.limit_test_batches=4")
ON_GPU += ("trainer.log_every_n_steps=1",)


@pytest.fixture(scope="module")
def alone_at() -> dict[str, Finished]:
    """The runs without DeepSpeed that were made already, by precision."""
    return {}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gpu_trains_as_without_deepspeed(
    stage: str, precision: str, alone_at: dict[str, Finished], train: Train
) -> None:
    run = ("model._target_=tests.engine.foreign.Convolutions", PICTURES, *ON_GPU, f"precision={precision}")
    alone = alone_at.get(precision) or train(*run, "strategy=single")
    alone_at[precision] = alone
    sharded = train(*run, f"strategy=deepspeed_stage_{stage}", ranks=1)
    tolerance = 1e-3 if precision == "32-true" else 0.05  # convolutions round to TF32
    assert sharded.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=tolerance)
    assert sharded.column("val/loss").keys() == alone.column("val/loss").keys()
