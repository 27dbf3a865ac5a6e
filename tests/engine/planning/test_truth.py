"""A plan says what real processes hold: within 1 %, under every strategy, by the same accounting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.conftest import Train
from tests.engine.tiny import LANGUAGE_MODEL

TEXT = "data._target_=tests.engine.planning.truth.NumbersOfText"
PICTURES = "data._target_=tests.engine.planning.truth.NumbersOfPictures"
MODELS = {
    "language": (*LANGUAGE_MODEL, TEXT),
    "pictures": ("model._target_=tests.engine.models.pictures.PatchClassifier", PICTURES, "data.samples=150"),
    "late": ("model._target_=tests.engine.foreign.Late", PICTURES, "data.samples=150"),
}
BATCH = ("global_batch_size=48", "micro_batch_size=12", "trainer.devices=2")  # two micro batches of 12 a device
REAL = (
    *("trainer.max_steps=3", "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0", "callbacks=progress"),
    *("trainer.enable_checkpointing=false", "~logger"),
    *(
        "callbacks.truth._target_=tests.engine.planning.truth.Truth",
        "callbacks.truth.folder=${hydra:runtime.output_dir}",
    ),
)
STRATEGIES = (
    *("ddp", "fsdp", "fsdp_grad_op", "fsdp_hybrid", "fsdp1"),
    "fsdp trainer.strategy.activation_checkpointing=true",
    "ddp trainer.strategy.gradient_as_bucket_view=true",
    "fsdp_tp trainer.strategy.plans.LanguageModel=tests.engine.models.language.tensor_parallel",
)


OTHERS = (("pictures", "ddp"), ("pictures", "fsdp"), ("late", "ddp"), ("late", "fsdp"), ("late", "fsdp1"))


@pytest.mark.parametrize(("model", "strategy"), [*(("language", name) for name in STRATEGIES), *OTHERS])
def test_a_plan_says_what_a_rank_holds(train: Train, model: str, strategy: str) -> None:
    words = (*MODELS[model], *BATCH, *f"strategy={strategy}".split())
    plan, real = _planned(train, *words), _real(train, *(word for word in words if "devices" not in word), ranks=2)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)
    assert plan["bytes_by_kind"] == pytest.approx(real["by_kind"], abs=0.01 * real["bytes"])
    assert plan["flops_per_step"] == real["flops"]


def test_what_is_offloaded_is_counted_on_the_host(train: Train) -> None:
    """On a CPU, the two are one: parameters, gradients and optimizer state lie there in any case."""
    words = (*MODELS["language"], *BATCH, "strategy=fsdp_offload")
    plan, real = _planned(train, *words), _real(train, *(word for word in words if "devices" not in word), ranks=2)
    assert plan["tensor_bytes"] + plan["host_bytes"] == pytest.approx(real["bytes"], rel=0.01)
    states = sum(real["by_kind"][kind] for kind in ("parameters", "gradients", "optimizer"))
    assert plan["host_bytes"] == pytest.approx(states, rel=0.01)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_plan_says_what_one_process_holds(train: Train, precision: str) -> None:
    words = (*MODELS["language"], "strategy=single", "global_batch_size=12", f"precision={precision}")
    plan, real = _planned(train, *words), _real(train, *words)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)


def _planned(train: Train, *words: str) -> dict[str, Any]:
    run = train("mode=plan", *words)
    strategy, *_ = json.loads((run.run_dir / "plan.json").read_text())["strategies"]  # then with less activations
    return dict(strategy)


def _real(train: Train, *words: str, ranks: int = 0) -> dict[str, Any]:
    """What the rank with the least holds: as gloo's threads keep what they have sent, it may be more."""
    run = train(*words, *REAL, ranks=ranks)
    peaks = [json.loads((run.run_dir / f"peak_{rank}.json").read_text()) for rank in range(max(1, ranks))]
    return dict(min(peaks, key=lambda peak: peak["bytes"]))
