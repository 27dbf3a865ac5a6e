"""Lightning's LearningRateFinder under more strategies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import Finished
from tests.engine.curves import largest_difference
from tests.engine.launch.test_rate_finder import FINDS, ON_TWO, alone, once, rate_of

__all__ = ["alone", "once"]  # fixtures


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "deepspeed_stage_2_offload"])
def test_the_rate_is_that_of_one_process(strategy: str, alone: Finished, once: Callable[..., Finished]) -> None:
    run = once(*FINDS, f"strategy={strategy}", *ON_TWO, ranks=2)
    assert rate_of(run) == rate_of(alone)
    assert largest_difference(run, alone) < 1e-5
