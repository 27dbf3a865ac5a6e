"""Under DeepSpeed, a run is the run of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import CHECKOUT, PLAIN, Finished, Train, runs_in
from tests.tiny import MODELS, NO_CHECKPOINTS

pytest.importorskip("deepspeed")

STAGES = ("1", "1_offload", "2", "2_offload", "3", "3_offload")
CPU = (*NO_CHECKPOINTS, "trainer.accelerator=cpu", "~callbacks.progress")
PARTS = ("callbacks.parts._target_=tests.strategies.zero.Parts", "callbacks.parts.folder=${hydra:runtime.output_dir}")
UNEVEN = (*PLAIN, "global_batch_size=24", "micro_batch_size=3", "trainer.max_steps=50", "trainer.log_every_n_steps=1")
UNEVEN += ("trainer.val_check_interval=25",)
RUNS = {**MODELS, "uneven batches": UNEVEN}
DIGITS = ("data=digits", "global_batch_size=16", "micro_batch_size=4", "trainer.max_steps=4")
DIGITS += ("trainer.val_check_interval=4", "trainer.limit_val_batches=4", "trainer.log_every_n_steps=1")


@pytest.fixture(scope="module", params=RUNS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finished]:
    train = runs_in(tmp_path_factory.mktemp(request.param.replace(" ", "_")))
    return request.param, train(*RUNS[request.param], *CPU, "strategy=single")


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_process(stage: str, alone: tuple[str, Finished], train: Train) -> None:
    model, reference = alone
    sharded = train(*RUNS[model], *CPU, f"strategy=deepspeed_stage_{stage}", ranks=2)
    for metric in ("train/loss", "val/loss", "test/loss", "samples"):
        expected, found = reference.column(metric), sharded.column(metric)
        assert found.keys() == expected.keys(), metric
        deltas = [abs(found[step] - expected[step]) for step in sorted(expected)]
        print(model, stage, metric, " ".join(f"{delta:.0e}" for delta in deltas))
        assert max(deltas) <= 1e-5, metric


def model(name: str) -> str:
    return f"model._target_=tests.strategies.modules.{name}"


@pytest.fixture(scope="module")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    train = runs_in(tmp_path_factory.mktemp("first_weights"))
    return weights(train(model("Late"), *DIGITS, *CPU, *PARTS, "strategy=single"), "start_0")


def weights(run: Finished, file: str) -> dict[str, torch.Tensor]:
    return torch.load(run.run_dir / f"{file}.pt")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", ["1", "3", "3_offload"])
def test_training_starts_from_the_same_weights(
    stage: str, ranks: int, first_weights: dict[str, torch.Tensor], train: Train
) -> None:
    run = train(model("Late"), *DIGITS, *CPU, *PARTS, f"strategy=deepspeed_stage_{stage}", ranks=ranks)
    for rank in range(ranks):
        found = weights(run, f"start_{rank}")
        assert found.keys() == first_weights.keys()
        assert all(torch.equal(found[name], first_weights[name]) for name in found)
    built_on = [elements(run.run_dir, rank)["built_on"] for rank in range(ranks)]
    assert built_on == ["cpu", *["meta" if stage.startswith("3") else "cpu"] * (ranks - 1)]


def elements(run_dir: Path, rank: int) -> dict:
    return json.loads((run_dir / f"elements_{rank}.json").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_holds_its_part(stage: str, train: Train) -> None:
    run = train(model("Convolutions"), *DIGITS, *CPU, *PARTS, f"strategy=deepspeed_stage_{stage}", ranks=2)
    for rank in range(2):
        held = elements(run.run_dir, rank)
        parts = 2 if stage.startswith("3") else 1
        padding = 8 * 2  # an element a parameter, and a few a group
        assert held["parameters"] == pytest.approx(held["whole"] / parts, abs=padding)
        assert held["states"] == pytest.approx(2 * held["whole"] / 2, abs=2 * padding)


@pytest.mark.parametrize("name", ["Convolutions", "Encoder", "Late"])
@pytest.mark.parametrize("stage", ["2", "3", "3_offload"])
def test_a_module_from_elsewhere_trains_as_under_ddp(name: str, stage: str, train: Train) -> None:
    run = (model(name), *DIGITS, *CPU, *PARTS)
    expected = train(*run, "strategy=ddp", ranks=2)
    found = train(*run, f"strategy=deepspeed_stage_{stage}", ranks=2)
    for metric in ("train/loss", "val/loss", "val/accuracy"):
        assert found.column(metric) == pytest.approx(expected.column(metric), abs=1e-5)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_precision_means_the_same(stage: str, train: Train) -> None:
    for precision, kept_in in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        run = (model("Encoder"), *DIGITS, *CPU, f"precision={precision}")
        alone = train(*run, "strategy=single")
        sharded = train(*run, *taken("TakenOut"), f"strategy=deepspeed_stage_{stage}", ranks=2)
        assert sharded.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=0.02)
        for weight, state in weights(sharded, "taken_0").values():
            assert {weight.dtype, state["exp_avg"].dtype} == {kept_in}
        assert "DeepSpeed's bf16" not in sharded.out


@pytest.mark.parametrize("stage", [2, 3])
def test_16_bit_weights_under_mixed_precision_are_told_once(stage: int, train: Train, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = (model("Encoder"), *DIGITS, *CPU, "strategy=deepspeed", f"trainer.strategy.config={tmp_path}/ds.json")
    trained = train(*run, *PARTS, "precision=bf16-mixed", ranks=2)
    assert trained.out.count("keeps the weights themselves in 16 bits") == 1
    assert all(torch.equal(weight, weight.bfloat16()) for weight in weights(trained, "end_0").values())


def test_two_optimizers_are_refused_with_the_reason(train: Train) -> None:
    run = (
        "model._target_=tests.strategies.zero.Adversaries",
        *DIGITS,
        *CPU,
        "micro_batch_size=16",
        "trainer.gradient_clip_val=null",
        "strategy=deepspeed_stage_2",
    )
    refused = train(*run, check=False)
    assert (refused.returncode, refused.err.count("error: ")) == (2, 1)
    assert "DeepSpeed steps one optimizer" in refused.err


def test_stages_follow_one_another_in_a_process() -> None:
    outs = []
    for stage in ("1", "3"):
        command = [sys.executable, str(Path(__file__).with_name("sequence.py")), stage, "offload"]
        environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'src'}"}
        outs.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    one, three = (out.splitlines()[-1].split() for out in outs)
    assert one == three
    assert one[0] == one[1] == one[3], "validation, test, and validation after prediction"


def taken(callback: str) -> tuple[str, ...]:
    options = ("before_step=2", "folder=${hydra:runtime.output_dir}")
    return tuple(f"callbacks.taken.{option}" for option in (f"_target_=tests.strategies.zero.{callback}", *options))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, dict]:
    train = runs_in(tmp_path_factory.mktemp("native"))
    run = train(model("Late"), *DIGITS, *CPU, *taken("Native"), "strategy=single")
    return run, weights(run, "taken_0")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_taken_out_and_put_back_changes_nothing(
    stage: str, ranks: int, native: tuple[Finished, dict], train: Train
) -> None:
    run = train(model("Late"), *DIGITS, *CPU, *taken("TakenOut"), f"strategy=deepspeed_stage_{stage}", ranks=ranks)
    found = weights(run, "taken_0")
    for name, (weight, state) in native[1].items():
        assert torch.allclose(found[name][0], weight, atol=1e-5), name
        assert found[name][1].keys() == state.keys(), name
        assert all(torch.allclose(found[name][1][key], value, atol=1e-5) for key, value in state.items()), name
    untouched = train(model("Late"), *DIGITS, *CPU, f"strategy=deepspeed_stage_{stage}", ranks=ranks)
    assert run.column("train/loss") == untouched.column("train/loss")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gpu_trains_as_without_deepspeed(stage: str, precision: str, train: Train) -> None:
    run = (model("Convolutions"), *DIGITS, *CPU, "trainer.accelerator=gpu", f"precision={precision}")
    alone = train(*run, "strategy=single")
    sharded = train(*run, f"strategy=deepspeed_stage_{stage}", ranks=1)
    tolerance = 1e-3 if precision == "32-true" else 0.05  # convolutions round to TF32
    assert sharded.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=tolerance)
    assert sharded.column("val/loss").keys() == alone.column("val/loss").keys()
