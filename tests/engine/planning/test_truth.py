"""A plan says what real processes hold: within 1 %, under every strategy, by the same accounting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.conftest import Train
from tests.engine.tiny import LANGUAGE_MODEL
from tests.night import at_night

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
TENSOR_PARALLEL = "fsdp_tp trainer.strategy.plans.LanguageModel=tests.engine.models.language.tensor_parallel"
RECOMPUTES = "fsdp trainer.strategy.activation_checkpointing=true"
BUCKETS = "ddp trainer.strategy.gradient_as_bucket_view=true"
DAILY = [("language", strategy) for strategy in ("ddp", TENSOR_PARALLEL, RECOMPUTES)]
OTHERS = [("language", strategy) for strategy in ("fsdp", "fsdp_hybrid", "fsdp_grad_op", BUCKETS)]
OTHERS += [(model, strategy) for model in ("pictures", "late") for strategy in ("fsdp", "ddp")] + [("late", RECOMPUTES)]


@pytest.mark.parametrize(("model", "strategy"), [*DAILY, *at_night(*OTHERS)])
def test_a_plan_says_what_a_rank_holds(model: str, strategy: str, train: Train) -> None:
    words = (*MODELS[model], *BATCH, *f"strategy={strategy}".split())
    plan, real = planned(train, *words), held(train, *(word for word in words if "devices" not in word), ranks=2)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)
    assert plan["bytes_by_kind"] == pytest.approx(real["by_kind"], abs=0.01 * real["bytes"])
    assert plan["flops_per_step"] == real["flops"]


def planned(train: Train, *words: str) -> dict[str, Any]:
    run = train("mode=plan", *words)
    strategy, *_ = json.loads((run.run_dir / "plan.json").read_text())["strategies"]  # then with less activations
    return dict(strategy)


def held(train: Train, *words: str, ranks: int = 0) -> dict[str, Any]:
    """What the rank with the least holds: as gloo's threads keep what they have sent, it may be more."""
    run = train(*words, *REAL, ranks=ranks)
    peaks = [json.loads((run.run_dir / f"peak_{rank}.json").read_text()) for rank in range(max(1, ranks))]
    return dict(min(peaks, key=lambda peak: peak["bytes"]))
