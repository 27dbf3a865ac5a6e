"""Weights that are written to outside of the optimizer are those of one process, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.errors import Refused
from lightswitch.failures.classify import Rank, failure_of
from lightswitch.strategies.weights import FIRST_STEP_ALONE
from tests.engine.fits import PLAIN, Curve, Fit, Fits
from tests.engine.plain import PlainData, PlainModel
from tests.engine.strategies import writing
from tests.night import at_night
from tests.pool import Pool, RankFailed
from tests.runs import largest_difference

pytest.importorskip("deepspeed")

STEPS = 8
UNITS = "fsdp units=[net.3]"  # the root gathers the others, such as net.0.bias
REPLICAS = ("deepspeed_stage_1", "deepspeed_stage_2")  # of what they do not step
IDIOMS = {  # where each may take another path: replicas, shards; the first by day
    **dict.fromkeys(("AtBatchStart", "InOptimizerStep", "InTrainingStep", "Clamped"), ("fsdp",)),
    "OnTop": ("fsdp gather=parts", "fsdp_grad_op gather=parts"),
    "AtBatchEnd": ("fsdp", "ddp", *REPLICAS),
    "ByHand": ("deepspeed_stage_2", "deepspeed_stage_1", "deepspeed_stage_3"),
    "PastTheWrapper": ("ddp",),
    "Copied": ("ddp", "fsdp", *REPLICAS),
}
CELLS = [(idiom, ways[0]) for idiom, ways in IDIOMS.items()]
CELLS += at_night(*((idiom, way) for idiom, ways in IDIOMS.items() for way in ways[1:]))


def fit(idiom: str, strategy: str = "single", arguments: str = "gradient_clip_val=null", **changed: Any) -> Fit:
    module: Callable[[], pl.LightningModule] = getattr(writing, idiom)
    start = replace(PLAIN, module=module, strategy=strategy, micro_batch=None, steps=STEPS, arguments=arguments)
    return replace(start, **changed)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(("idiom", "strategy"), CELLS)
def test_what_is_written_is_as_in_one_process(idiom: str, strategy: str, fits: Fits) -> None:
    (alone,), ranks = fits(fit(idiom)), fits(fit(idiom, strategy), 2)
    assert len(alone.column("train/loss")) == STEPS
    assert distance(alone.end, alone.start) > 0.01
    assert largest_difference(ranks[0], alone) <= 1e-5
    assert distance(ranks[0].end, alone.end) <= 1e-5
    assert distance(ranks[1].end, ranks[0].end) == 0


BOUNDED = {
    "ddp": "rows.weight of rank 1 differs from rank 0 after step 1",
    "fsdp": "rows.weight is written in a step where fsdp has gathered it, so the write would be lost",
}


@pytest.mark.parametrize("strategy", BOUNDED)
def test_an_embedding_that_bounds_the_rows_it_reads_is_refused(strategy: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(fit("BoundedEmbedding", strategy, agrees=True), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(BOUNDED[strategy])


@pytest.mark.parametrize(
    "hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end", "on_validation_batch_end"]
)
def test_so_is_what_a_callback_writes_in_any_hook(hook: str, fits: Fits) -> None:
    callbacks = (partial(writing.Shrinks, hook), writing.Idle)  # a hook of another callback may look at weights
    shrinking = {"callbacks": callbacks, "data": partial(PlainData, 96), "steps": 12}  # three epochs
    # the root gathers weights, and keeps them after the forward pass of an evaluation
    (alone,), run = fits(fit("PlainModel", **shrinking)), fits(fit("PlainModel", UNITS, **shrinking), 2)[0]
    assert distance(alone.end, alone.start) > 0.01
    assert distance(run.end, alone.end) <= 1e-5
    assert largest_difference(run, alone) <= 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_that_each_rank_sets_from_its_share_of_the_first_batch_are_refused(strategy: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(fit("Normalized", strategy, agrees=True), 2)
    assert "net.1.scale" in str(failed.value.error)
    assert "net.1.shift" in str(failed.value.error)
    assert FIRST_STEP_ALONE in str(failed.value.error)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("strategy", ["ddp", *at_night("fsdp", "deepspeed_stage_2")])
def test_a_run_whose_first_step_was_made_in_one_process_goes_on_on_several(
    strategy: str, fits: Fits, pool: Pool, tmp_path: Path
) -> None:
    (alone,) = fits(fit("Normalized"))
    arguments = f"gradient_clip_val=null default_root_dir={tmp_path}"
    first, then = (fit("Normalized", way, arguments, agrees=True) for way in ("single", strategy))
    pool(1)(saved, replace(first, steps=1), tmp_path, None, 1)
    after = pool(2)(saved, then, tmp_path, tmp_path / "step_1.ckpt")[0]
    expected = alone.column("train/loss")
    assert after.keys() == expected.keys() - {0}
    assert max(abs(after[step] - expected[step]) for step in after) <= 1e-5


def test_a_write_in_a_step_that_fsdp_would_lose_is_refused_with_the_switch_that_takes_it(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(fit("OnTop", "fsdp"), 2)
    assert isinstance(failed.value.error, Refused)
    assert "is written in a step where fsdp has gathered it" in str(failed.value.error)
    assert "type trainer.strategy.gather=parts, or use strategy=ddp" in str(failed.value.error)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("ways", [*at_night((("deepspeed_stage_2", "fsdp"),)), ("fsdp", "deepspeed_stage_2")])
def test_a_run_goes_on_with_what_was_written_under_another_strategy(
    ways: tuple[str, str], fits: Fits, pool: Pool, tmp_path: Path
) -> None:
    (alone,) = fits(fit("AtBatchEnd"))
    arguments = f"gradient_clip_val=null default_root_dir={tmp_path}"
    first, then = (fit("AtBatchEnd", way, arguments) for way in ways)
    before = pool(2)(saved, replace(first, steps=3), tmp_path)[0]
    after = pool(2)(saved, then, tmp_path, tmp_path / "step_3.ckpt")[0]
    expected = alone.column("train/loss")
    found = {**before, **after}
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) <= 1e-5


def saved(fit: Fit, folder: Path, resumed: Path | None = None, every_n_steps: int = 3) -> dict[int, float]:
    pl.seed_everything(42, workers=True, verbose=False)
    curve = Curve()
    trainer = fit.trainer(LastCheckpoints(str(folder), every_n_steps=every_n_steps), logger=curve)
    trainer.fit(fit.module(), fit.data(), ckpt_path=resumed)
    if dist.is_initialized():
        dist.barrier()  # the pool ends a rank that has used DeepSpeed, which may be the one that has the others' store
    return curve.columns["train/loss"]


class ReadsAPart(writing.PlainModel):
    """Computes with a weight of a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(2, 16)

    def training_step(self, batch: writing.Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0] + self.queries.weight.mean(0)), batch[1])


def test_a_read_in_a_step_that_needs_all_weights_is_refused_with_the_switch_that_takes_it(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(fit("Clamped", "fsdp gather=parts", module=ReadsAPart), 2)
    assert isinstance(failed.value.error, Refused)
    assert "type trainer.strategy.gather=step, or use strategy=ddp" in str(failed.value.error)


FAILING = {"ReadsInEvaluation": ("fsdp", "FSDP"), "PastTheWrapper": ("deepspeed_stage_2", "DeepSpeed")}


@pytest.mark.parametrize("idiom", FAILING)
def test_what_a_strategy_can_not_do_is_told_with_another(idiom: str, fits: Fits) -> None:
    strategy, name = FAILING[idiom]
    with pytest.raises(RankFailed) as failed:
        fits(fit(idiom, strategy), 2)
    assert failed.value.error is not None
    line = failure_of(Rank(0, 2, "here", 1), failed.value.error).line
    assert f"{idiom} fails in its first steps under {name}, which shards parameters over" in line


class WritesLate(writing.PlainModel):
    """Writes within its forward pass, from an epoch or a step on."""

    def __init__(self, epoch: int = 1, step: int = 0) -> None:
        super().__init__()
        self.epoch, self.step = epoch, step

    def training_step(self, batch: writing.Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.current_epoch >= self.epoch and self.global_step >= self.step:
            self.net[0].bias.data.mul_(0.9)
        return loss


COPIES = {
    UNITS: "net.0.bias is written in a step where fsdp has gathered it, so the write would be lost",
    "deepspeed_stage_2": "training_step of WritesLate writes net.0.bias, but DeepSpeed keeps another",
}


@pytest.mark.parametrize("strategy", COPIES)
def test_what_begins_to_be_written_later_is_refused_in_the_next_epoch(strategy: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(fit("Clamped", strategy, module=WritesLate, data=partial(PlainData, 96)), 2)  # of four steps an epoch
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(COPIES[strategy])


@pytest.mark.parametrize("strategy", [UNITS, *at_night("deepspeed_stage_2")])
def test_or_after_the_next_save(strategy: str, pool: Pool, tmp_path: Path) -> None:
    arguments = f"gradient_clip_val=null default_root_dir={tmp_path}"
    late = fit("Clamped", strategy, arguments, module=partial(WritesLate, 0, 5))
    with pytest.raises(RankFailed) as failed:
        pool(2)(saved, late, tmp_path, None, 6)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(COPIES[strategy])
    assert [path.name for path in tmp_path.glob("step_*.ckpt")] == ["step_6.ckpt"]


class Merged(nn.Linear):
    """A layer whose update is merged into its weight by `eval()`, and taken out of it by `train()`, as in loralib."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.weight.requires_grad, self.is_merged = False, False
        self.into, self.out = nn.Parameter(torch.randn(2, 16) / 4), nn.Parameter(torch.zeros(16, 2))

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (self.out @ self.into) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        update = 0 if self.is_merged else x @ self.into.t() @ self.out.t()
        return super().forward(x) + update


class MergesInEvaluation(writing.PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), Merged(), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net.train()  # Lightning restores `training` after a validation without calling it
        return super().training_step(batch, batch_idx)


def curve_with_validations(fit: Fit) -> dict[int, float]:
    """Validate before the first step, and every fourth one."""
    curve = Curve()
    pl.seed_everything(42, workers=True, verbose=False)
    trainer = fit.trainer(logger=curve)
    trainer.val_check_interval = 4
    trainer.fit(fit.module(), fit.data())
    return curve.columns["train/loss"]


def test_a_write_in_an_evaluation_or_in_the_step_after_it_is_carried_or_refused(pool: Pool) -> None:
    one = replace(PLAIN, module=MergesInEvaluation, micro_batch=None, steps=12, arguments="gradient_clip_val=null")
    (alone,) = pool(1)(curve_with_validations, one)
    try:
        run = pool(2)(curve_with_validations, replace(one, strategy="fsdp"))[0]
    except RankFailed as failed:
        assert isinstance(failed.error, Refused)  # noqa: PT017  # a run that holds is as good
    else:
        assert run == pytest.approx(alone, rel=1e-4)


# Layers that are frozen while a step is under way


class FrozenInMidStep(PlainModel):
    """Freezes a layer for the second half of each step's micro batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        count = self.trainer.accumulate_grad_batches
        self.net[0].requires_grad_(batch_idx % count < count / 2)


class UnfrozenInStep(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(self.global_step >= 2)
        return super().training_step(batch, batch_idx)


def test_fsdp_freezes_within_a_step_as_one_process(fits: Fits) -> None:
    module = UnfrozenInStep
    (alone,), run = fits(fit("Clamped", module=module)), fits(fit("Clamped", UNITS, module=module), 2)[0]
    assert largest_difference(run, alone) <= 1e-5
    assert distance(run.end, alone.end) <= 1e-5


def test_ddp_refuses_what_is_frozen_within_a_step(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, module=FrozenInMidStep, strategy="ddp"), 2)
    assert isinstance(failed.value.error, Refused)
    told = "net.0.weight, net.0.bias did not contribute to the loss, but ddp waits for every gradient"
    assert str(failed.value.error).startswith(told)
