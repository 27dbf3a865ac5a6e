"""Where memory has run out, the next thing to try is named, with its command."""

from __future__ import annotations

import pytest

from lightswitch.planning.fakes import has_collectives
from tests.engine.conftest import PLAIN_DATA, Train
from tests.engine.failures.failing import FAILING_MODEL
from tests.night import at_night

RAISING = (
    *(FAILING_MODEL, PLAIN_DATA, "run_id=mine"),
    *("model.how='lacks device memory'", "model.where='training_step 0'", "model.rank=null"),
)


@pytest.mark.skipif(not has_collectives(), reason="torch has no collectives for tensors without values")
@pytest.mark.parametrize("ranks", [2, *at_night(0)])
def test_a_smaller_micro_batch_is_the_first_thing_to_try(ranks: int, train: Train) -> None:
    failed = train(*RAISING, "global_batch_size=32", "strategy=ddp", ranks=ranks, check=False)
    assert failed.returncode == 1
    (line,) = (line for line in failed.err.splitlines() if line.startswith("next: "))
    started, _, command = line.partition("; try ")
    assert started.startswith("next: parameters, gradients and optimizer state are ")
    assert command.endswith(f" strategy=ddp micro_batch_size={8 if ranks else 16} run_id=mine")
