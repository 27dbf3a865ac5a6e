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

from lightswitch.deepspeed import state as zero_state
from lightswitch.deepspeed.strategy import DeepSpeed
from lightswitch.errors import Refused
from tests.engine import foreign
from tests.engine.conftest import Finished, Train
from tests.engine.deepspeed.zero import Native, TakenOut
from tests.engine.fits import CLASSIFIER, LANGUAGE, PLAIN, Fit, Fits
from tests.engine.models.pictures import Pictures
from tests.engine.plain import PlainModel, UsedByRank0
from tests.engine.strategies import writing
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
ENCODER = Fit(foreign.Encoder, Pictures, global_batch=16, micro_batch=4)
LATE = replace(ENCODER, module=foreign.Late)


@pytest.mark.parametrize(("model", "stage"), CASES)
def test_losses_are_those_of_one_process(model: str, stage: str, fits: Fits) -> None:
    (alone,), sharded = fits(FITS[model]), fits(replace(FITS[model], strategy=f"deepspeed_stage_{stage}"), 2)[0]
    for metric in ("train/loss", "val/loss", "test/loss", "samples"):
        assert largest_difference(sharded, alone, metric) <= 1e-5, metric


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "kept_in", "stage"), [("bf16-mixed", torch.float32, "1"), ("bf16-true", torch.bfloat16, "3")]
)
def test_precision_means_the_same(precision: str, kept_in: torch.dtype, stage: str, fits: Fits, tmp_path: Path) -> None:
    rounded = replace(ENCODER, arguments=f"precision={precision}")
    taken = partial(TakenOut, folder=str(tmp_path), before_step=2)
    (alone,), sharded = (
        fits(rounded),
        fits(replace(rounded, strategy=f"deepspeed_stage_{stage}", callbacks=(taken,)), 2)[0],
    )
    assert sharded.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=0.02)
    for weight, state in torch.load(tmp_path / "taken_0.pt").values():
        assert {weight.dtype, state["exp_avg"].dtype} == {kept_in}


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


def in_sequence() -> tuple[float, float, float, int]:
    """What fit, validate, test and predict tell under ZeRO-3 with offload, one after another in the same processes."""
    pl.seed_everything(1, workers=True, verbose=False)
    module, data = foreign.Convolutions(), Pictures()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DeepSpeed(stage=3, offload_optimizer=True), max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    validated = trainer.callback_metrics["val/loss"].item()
    trainer.test(module, data, verbose=False)
    tested = trainer.callback_metrics["test/loss"].item()
    predicted = sum(len(batch) for batch in trainer.predict(module, data))
    return validated, tested, trainer.validate(module, data, verbose=False)[0]["val/loss"], predicted


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")  # which is what the test takes
def test_stages_follow_one_another_in_a_process(pool: Pool) -> None:
    validated, tested, again, predicted = pool(2)(in_sequence)[0]
    assert validated == tested == again
    assert predicted == 45  # half of the 90, on each of two ranks


@pytest.mark.parametrize(("stage", "ranks"), [*((stage, 2) for stage in STAGES), ("1", 1), ("3", 1)])
def test_a_state_taken_out_and_put_back_changes_nothing(stage: str, ranks: int, fits: Fits, tmp_path: Path) -> None:
    native, taken = (partial(one, folder=str(tmp_path / one.__name__), before_step=2) for one in (Native, TakenOut))
    for one in (Native, TakenOut):
        (tmp_path / one.__name__).mkdir()
    (alone,) = fits(replace(LATE, callbacks=(native,)))
    sharded = fits(replace(LATE, strategy=f"deepspeed_stage_{stage}", callbacks=(taken,)), ranks)
    expected, found = (torch.load(tmp_path / one.__name__ / "taken_0.pt") for one in (Native, TakenOut))
    assert any(state for _, state in expected.values())  # what is frozen has none
    for name, (weight, state) in expected.items():
        assert torch.allclose(found[name][0], weight, atol=1e-5), name
        assert found[name][1].keys() == state.keys(), name
        assert all(torch.allclose(found[name][1][key], value, atol=1e-5) for key, value in state.items()), name
    assert largest_difference(sharded[0], alone, "train/loss") <= 1e-5
    for rank in sharded:
        assert_holds_its_part(rank.held, ranks if stage.startswith("3") else 1, ranks)


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


@pytest.mark.parametrize("stage", ["1", "3"])
def test_states_that_are_put_back_keep_their_dtypes(stage: str, fits: Fits, tmp_path: Path) -> None:
    own, taken = replace(PLAIN, module=Counted, micro_batch=None), partial(TakenOut, str(tmp_path), before_step=3)
    (alone,), run = fits(own), fits(replace(own, strategy=f"deepspeed_stage_{stage}", callbacks=(taken,)), 2)[0]
    assert largest_difference(run, alone, "train/loss") <= 1e-5
    _, state = torch.load(tmp_path / "taken_0.pt")["net.0.weight"]
    assert (state["count"].dtype, state["mask"].dtype) == (torch.long, torch.bool)
    assert state["count"].unique().tolist() == [3]


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
    "Swapped-3": f"validation_step of Swapped accesses net.0.weight{_SHARD}",
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


def assert_holds_its_part(elements: dict[str, int], parts: int, ranks: int) -> None:
    padding = 32  # an element a parameter, and a few a group
    assert elements["parameters"] == pytest.approx(elements["whole"] / parts, abs=padding)
    assert elements["optimizer"] == pytest.approx(2 * elements["trained"] / ranks, abs=2 * padding)


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
