"""torch's older FSDP: each of its shardings and options is the run of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from lightswitch.checkpoints.reader import Reader
from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.strategies.witness import WITNESS, held, tensors
from tests.engine.tiny import LANGUAGE, MODELS, NO_CHECKPOINTS

FSDP1 = ("strategy=fsdp1", "trainer.accelerator=cpu", *NO_CHECKPOINTS)
SHARDINGS = {
    "FULL_SHARD": 2,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 2,
    "HYBRID_SHARD trainer.strategy.device_mesh=[2,2]": 4,
    "_HYBRID_SHARD_ZERO2 trainer.strategy.device_mesh=[2,2]": 4,
}
OPTIONS = {
    "activation_checkpointing=true": 2,
    "auto_wrap_policy=[Attention,MLP]": 2,
    "cpu_offload=true": 2,
    "sharding_strategy=HYBRID_SHARD": 2,
    "mixed_precision={reduce_dtype:float32}": 2,
    "sharding_strategy=FULL_SHARD": 1,
}


CASES = [*(("language", sharding) for sharding in SHARDINGS), ("classifier", "FULL_SHARD")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    train = runs_in(tmp_path_factory.mktemp("alone"))
    return cache(lambda model: train(*MODELS[model], *WITNESS, *NO_CHECKPOINTS, "strategy=single"))


@pytest.fixture(scope="module")
def language_alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("language"))(*SHORT_LANGUAGE, *WITNESS, *NO_CHECKPOINTS, "strategy=single")


SHORT_LANGUAGE = (*LANGUAGE, "trainer.max_steps=10", "trainer.val_check_interval=10")


@pytest.mark.parametrize(("model", "sharding"), CASES)
def test_every_sharding_keeps_the_losses_and_the_initial_weights(
    model: str, sharding: str, alone: Callable[[str], Finished], train: Train
) -> None:
    reference = alone(model)
    typed, ranks = f"trainer.strategy.sharding_strategy={sharding}".split(), SHARDINGS[sharding]
    run = train(*MODELS[model], *WITNESS, *FSDP1, *typed, ranks=ranks)

    assert len(run.column("train/loss")) == 50
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(run, reference, metric) <= 1e-5, metric
    part = 1 if sharding == "NO_SHARD" else 0.5
    for rank in range(ranks):
        assert tensors(run, "start", rank) == tensors(reference, "start", 0)
        elements = held(run, rank)
        assert elements["parameters"] == pytest.approx(elements["whole"] * part, rel=0.01)
        assert elements["optimizer"] == pytest.approx(2 * elements["trained"] * part, rel=0.01)
    assert "FSDP" not in run.err
    assert "Warning" not in run.err
    assert run.out.count("fsdp1 is torch's older FSDP, which it is giving up; strategy=fsdp is its successor") == 1


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_keeps_the_losses(option: str, language_alone: Finished, train: Train) -> None:
    run = train(*SHORT_LANGUAGE, *FSDP1, f"trainer.strategy.{option}", ranks=OPTIONS[option])
    assert largest_difference(run, language_alone) <= 1e-5


def test_clipping_by_value_and_bf16_are_those_of_one_process(train: Train) -> None:
    switches = (*SHORT_LANGUAGE, "+trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=0.01")
    switches += ("precision=bf16-mixed",)
    alone, run = train(*switches, *NO_CHECKPOINTS, "strategy=single"), train(*switches, *FSDP1, ranks=2)
    assert largest_difference(run, alone) < 2e-3


def test_a_checkpoint_after_a_resume_holds_the_steps_of_those_that_keep_the_parameters(train: Train) -> None:
    """A rank that keeps nothing of a parameter does not step it."""
    run = (*LANGUAGE, "strategy=fsdp1", "trainer.accelerator=cpu", "run_id=mine", "trainer.limit_val_batches=0")
    begun = train(*run, "trainer.max_steps=2", ranks=2)
    train(*run, "trainer.max_steps=4", ranks=2, folder=begun.folder)
    reader = Reader(begun.run_dir / "checkpoints" / "step_4.ckpt", None)
    steps = {
        name: reader.read(f"optimizer.0.{name}").item()
        for name in reader.names("optimizer.0.")
        if name.endswith(".step")
    }
    assert len(steps) > 10
    assert set(steps.values()) == {4.0}
