"""A plan says what real processes hold, under the strategies and precisions that a day leaves out."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Train
from tests.engine.planning.test_truth import BATCH, MODELS, held, planned


def test_what_is_offloaded_is_counted_on_the_host(train: Train) -> None:
    """On a CPU, the two are one; a plan for a GPU has the peak of each."""
    words = (*MODELS["language"], *BATCH, "strategy=fsdp_offload")
    real = held(train, *(word for word in words if "devices" not in word), ranks=2)
    here, there = (planned(train, *words, "precision=32-true", f"plan.device={name}") for name in ("here", "h100"))
    assert (here["tensor_bytes"], here["host_bytes"]) == (pytest.approx(real["bytes"], rel=0.01), 0)
    for name, bytes in (("device_bytes", there["tensor_bytes"]), ("host_bytes", there["host_bytes"])):
        assert bytes == pytest.approx(real[name], rel=0.01)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_plan_says_what_one_process_holds(train: Train, precision: str) -> None:
    words = (*MODELS["language"], "strategy=single", "global_batch_size=12", f"precision={precision}")
    plan, real = planned(train, *words), held(train, *words)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)
