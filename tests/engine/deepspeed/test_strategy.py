"""Under DeepSpeed, a run is the run of one process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainModel
from tests.engine.strategies.witness import WITNESS, held
from tests.engine.tiny import MODELS, NO_CHECKPOINTS, PICTURES

pytest.importorskip("deepspeed")

STAGES = ("1", "1_offload", "2", "2_offload", "3", "3_offload")
CPU = (*NO_CHECKPOINTS, "trainer.accelerator=cpu", "~callbacks.progress")
UNEVEN = (*PLAIN, "global_batch_size=24", "micro_batch_size=3", "trainer.max_steps=50", "trainer.log_every_n_steps=1")
UNEVEN += ("trainer.val_check_interval=25",)
RUNS = {**MODELS, "uneven batches": UNEVEN}
OVER_PICTURES = (PICTURES, "global_batch_size=16", "micro_batch_size=4", "trainer.max_steps=4")
OVER_PICTURES += ("trainer.val_check_interval=4", "trainer.limit_val_batches=4", "trainer.limit_test_batches=4")
OVER_PICTURES += ("trainer.log_every_n_steps=1",)


CASES = [
    *(("language", stage) for stage in STAGES),
    ("classifier", "3"),
    ("uneven batches", "3"),
]

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of each kind, once."""
    return cache(runs_in(tmp_path_factory.mktemp("deepspeed")))


@pytest.mark.parametrize(("model", "stage"), CASES)
def test_losses_are_those_of_one_process(model: str, stage: str, run: Run) -> None:
    alone = run(*RUNS[model], *CPU, "strategy=single")
    sharded = run(*RUNS[model], *CPU, f"strategy=deepspeed_stage_{stage}", ranks=2)
    for metric in ("train/loss", "val/loss", "test/loss", "samples"):
        assert largest_difference(sharded, alone, metric) <= 1e-5, metric
    assert len(sharded.column("train/loss")) == 50


def model(name: str) -> str:
    return f"model._target_=tests.engine.foreign.{name}"


def weights(run: Finished, file: str) -> dict[str, torch.Tensor]:
    return torch.load(run.run_dir / f"{file}.pt")


@pytest.mark.parametrize("stage", ["1", "3"])
@pytest.mark.parametrize(("precision", "kept_in"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precision_means_the_same(precision: str, kept_in: torch.dtype, stage: str, run: Run) -> None:
    encoder = (model("Encoder"), *OVER_PICTURES, *CPU, f"precision={precision}")
    alone = run(*encoder, "strategy=single")
    sharded = run(*encoder, *taken("TakenOut"), f"strategy=deepspeed_stage_{stage}", ranks=2)
    assert sharded.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=0.02)
    for weight, state in weights(sharded, "taken_0").values():
        assert {weight.dtype, state["exp_avg"].dtype} == {kept_in}
    assert "keeps the weights themselves in 16 bits" not in sharded.out


@pytest.mark.parametrize("stage", [2, 3])
def test_16_bit_weights_under_mixed_precision_are_told_once(stage: int, train: Train, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = (model("Encoder"), *OVER_PICTURES, *CPU, "strategy=deepspeed", f"trainer.strategy.config={tmp_path}/ds.json")
    trained = train(*run, *WITNESS, "precision=bf16-mixed", ranks=2)
    assert trained.out.count("keeps the weights themselves in 16 bits") == 1
    parameters = [weight for name, weight in weights(trained, "end_0").items() if name.endswith(("weight", "bias"))]
    assert {weight.dtype for weight in parameters} == {torch.bfloat16}


class WatchingModel(PlainModel):
    def on_after_backward(self) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())


def test_a_hook_that_sees_no_gradients_is_told_of_once(train: Train) -> None:
    watching = "model._target_=tests.engine.deepspeed.test_strategy.WatchingModel"
    run = train(*PLAIN, watching, *CPU, "trainer.max_steps=2", "strategy=deepspeed_stage_2", ranks=2)
    told = "on_after_backward of WatchingModel: DeepSpeed keeps gradients to itself, and p.grad has none there; "
    assert run.out.count(told) == 1


def test_stages_follow_one_another_in_a_process() -> None:
    command = ["python", str(Path(__file__).with_name("sequence.py"))]
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'src'}"}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    validated, tested, again, predicted = ended.stdout.splitlines()[-1].split()
    assert validated == tested == again
    assert int(predicted) == 45  # half of the 90, on each of two ranks


def taken(callback: str) -> tuple[str, ...]:
    options = ("before_step=2", "folder=${hydra:runtime.output_dir}")
    return tuple(
        f"callbacks.taken.{option}" for option in (f"_target_=tests.engine.deepspeed.zero.{callback}", *options)
    )


@pytest.mark.parametrize(("stage", "ranks"), [*((stage, 2) for stage in STAGES), ("1", 1), ("3", 1)])
def test_a_state_taken_out_and_put_back_changes_nothing(stage: str, ranks: int, run: Run) -> None:
    late = (model("Late"), *OVER_PICTURES, *CPU, *WITNESS)
    alone = run(*late, *taken("Native"), "strategy=single")
    sharded = run(*late, *taken("TakenOut"), f"strategy=deepspeed_stage_{stage}", ranks=ranks)
    found, expected = weights(sharded, "taken_0"), weights(alone, "taken_0")
    assert any(state for _, state in expected.values())  # what is frozen has none
    for name, (weight, state) in expected.items():
        assert torch.allclose(found[name][0], weight, atol=1e-5), name
        assert found[name][1].keys() == state.keys(), name
        assert all(torch.allclose(found[name][1][key], value, atol=1e-5) for key, value in state.items()), name
    assert largest_difference(sharded, alone, "train/loss") <= 1e-5
    for rank in range(ranks):
        assert_holds_its_part(held(sharded, rank), ranks if stage.startswith("3") else 1, ranks)


def assert_holds_its_part(elements: dict[str, int], parts: int, ranks: int) -> None:
    padding = 32  # an element a parameter, and a few a group
    assert elements["parameters"] == pytest.approx(elements["whole"] / parts, abs=padding)
    assert elements["optimizer"] == pytest.approx(2 * elements["trained"] / ranks, abs=2 * padding)


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
    run = (model("Convolutions"), *OVER_PICTURES, *CPU, "trainer.accelerator=gpu", f"precision={precision}")
    alone = alone_at.get(precision) or train(*run, "strategy=single")
    alone_at[precision] = alone
    sharded = train(*run, f"strategy=deepspeed_stage_{stage}", ranks=1)
    tolerance = 1e-3 if precision == "32-true" else 0.05  # convolutions round to TF32
    assert sharded.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=tolerance)
    assert sharded.column("val/loss").keys() == alone.column("val/loss").keys()
