"""mode=plan: what it prints and leaves, and what bad input gets."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.engine.config.mistaken import answers
from tests.engine.conftest import Train
from tests.engine.tiny import LANGUAGE_MODEL, TEXT

MODEL = (*LANGUAGE_MODEL, TEXT, "global_batch_size=16")
H100 = ("plan.device=h100", "trainer.devices=8")


@pytest.mark.nightly
def test_a_plan_compares_strategies_on_devices_that_are_not_here(train: Train) -> None:
    run = train("mode=plan", *MODEL, *H100, "precision=32-true", "plan.deepspeed=true")
    plan = json.loads((run.run_dir / "plan.json").read_text())
    best = plan["strategies"][0]["words"][0].removeprefix("strategy=")
    names = {one["words"][0] for one in plan["strategies"]}
    assert names >= {"strategy=ddp", "strategy=fsdp", "strategy=fsdp_grad_op", "strategy=fsdp_offload"}
    assert names >= {f"strategy=deepspeed_stage_{stage}{where}" for stage in (1, 2, 3) for where in ("", "_offload")}
    assert "single uses one device" in plan["refused"]["single"]
    assert all(one["fits"] and one["bound_by"] for one in plan["strategies"])
    (taken,) = (line for line in run.out.splitlines() if line.startswith("take"))
    assert f"{best}, micro batch 2: " in taken
    assert "of 78.8 GiB on H100" in taken
    (command,) = (line for line in run.out.splitlines() if line.startswith("start"))
    assert shlex.split(command)[3:] == [*(*MODEL, "trainer.devices=8", "precision=32-true", f"strategy={best}")]
    assert {path.name for path in run.run_dir.iterdir()} >= {"plan.json"}
    assert not (run.run_dir / "checkpoints").exists()


@pytest.mark.nightly
def test_a_micro_batch_that_fits_is_found(train: Train) -> None:
    """A sample's activations are 0.17 MiB: a device of 2.2 MiB beside its runtime holds no share of 16."""
    words = ("strategy=ddp", "trainer.devices=1", "plan.device=h100", "precision=32-true")
    whole = _only(train("mode=plan", *MODEL, *words))
    less = (whole["bytes"] - whole["tensor_bytes"] / 3) / 0.99 / 2**30
    found = _only(train("mode=plan", *MODEL, *words, f"plan.memory_gib={less}"))
    assert found["fits"]
    assert found["micro_batch"] < whole["micro_batch"] == 16
    assert found["micro_batch"] * found["accumulation"] == 16
    assert found["bytes"] <= found["memory"]["usable_bytes"] == pytest.approx(less * 2**30 * 0.99)


def _only(run: object) -> dict[str, object]:
    (found,) = json.loads((run.run_dir / "plan.json").read_text())["strategies"]  # type: ignore[attr-defined]
    return dict(found)


ASKING = (
    "model._target_=tests.engine.foreign.LooksAtValues",
    "data._target_=tests.engine.models.pictures.Pictures",
)


def test_a_plan_says_which_values_it_has_replaced(train: Train) -> None:
    """The metric's counts and the loss that is asked for."""
    run = train("mode=plan", *ASKING, "strategy=ddp")
    (line,) = (line for line in run.out.splitlines() if line.startswith("replaced"))
    assert "2 values that a micro batch reads from tensors, the first at " in line
    assert "tests/engine/foreign.py:" in line
    assert ", with replaced values" in next(line for line in run.out.splitlines() if line.startswith("take"))
    assert sum(_only(run)["replaced"].values()) == 2


REFUSED = {
    "plan.device=h300": "device=h300: there is no such device. Did you mean h200?",
    "plan.precisions=[16-mixed]": "Type precision=NAME, in a plan for each",
    "precision=16-true plan.device=h100": "AdamW divides by its eps",
    "plan.memory_gib=-1": "plan.memory_gib=-1: use a number from 0.001 to 1000000",
}


def test_bad_input_gets_a_line_before_a_plan_is_made(tmp_path: Path) -> None:
    found = answers({words: ["mode=plan", *MODEL, *words.split()] for words in REFUSED}, tmp_path)
    for words, told in REFUSED.items():
        assert told in found[words].err, words
        assert (found[words].err.count("\n"), found[words].returncode) == (1, 2)
        assert found[words].left == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("~data", "model._target_=tests.engine.foreign.Late"), "a batch of training data, and there is no"),
        ((*MODEL, "precision=bf16-mixed", "plan.device=v100"), "precision=bf16-mixed: V100 32 GB has no bfloat16, "),
        (("model._target_=tests.engine.foreign.WaitsForAValue", ASKING[1], "strategy=ddp"), "more than 10000 times, "),
        ((*MODEL, "strategy=fsdp", "model.heads=3"), "a step of the model fails: "),
    ],
)
@pytest.mark.nightly
def test_what_is_found_once_torch_is_there_is_a_line(train: Train, words: tuple[str, ...], told: str) -> None:
    run = train("mode=plan", *words, check=False)
    assert run.returncode == 2
    assert len(run.err.strip().splitlines()) == 1
    assert told in run.err
    assert {path.name for path in run.folder.glob("runs/*/*/*")} <= {"train.log"}  # with the traceback of a user's code


def test_a_plan_is_made_by_one_process(train: Train) -> None:
    run = train("mode=plan", *MODEL, ranks=2, check=False)
    assert run.returncode == 2
    assert "mode=plan runs in a single process, but torchrun started several" in run.err


@pytest.mark.gpu
@pytest.mark.parametrize("words", [("mode=plan",), ("mode=dry_run", "strategy=fsdp"), ("micro_batch_size=auto",)])
def test_a_plan_is_made_for_the_gpu_that_is_here(words: tuple[str, ...], train: Train) -> None:
    run = train(*words, *MODEL, "trainer.accelerator=gpu", "trainer.devices=1", "trainer.max_steps=2")
    assert torch.cuda.get_device_name() in run.out
