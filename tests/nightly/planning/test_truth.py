"""A plan says what real processes hold, under the strategies and precisions that a day leaves out."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Train
from tests.engine.planning.test_truth import BATCH, MODELS, held, planned


def test_what_is_offloaded_is_counted_on_the_host(train: Train) -> None:
    """On a CPU, the two are one: parameters, gradients and optimizer state lie there in any case."""
    words = (*MODELS["language"], *BATCH, "strategy=fsdp_offload")
    plan, real = planned(train, *words), held(train, *(word for word in words if "devices" not in word), ranks=2)
    assert plan["tensor_bytes"] + plan["host_bytes"] == pytest.approx(real["bytes"], rel=0.01)
    states = sum(real["by_kind"][kind] for kind in ("parameters", "gradients", "optimizer"))
    assert plan["host_bytes"] == pytest.approx(states, rel=0.01)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_plan_says_what_one_process_holds(train: Train, precision: str) -> None:
    words = (*MODELS["language"], "strategy=single", "global_batch_size=12", f"precision={precision}")
    plan, real = planned(train, *words), held(train, *words)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)
