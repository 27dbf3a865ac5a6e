"""More damages to checkpoints than the daily tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.checkpoints import test_fuzzed as daily
from tests.engine.checkpoints.test_fuzzed import BATCH, trained
from tests.engine.conftest import Train

__all__ = ["trained"]


@pytest.mark.parametrize("first", range(300, 2000, BATCH))
def test_a_damaged_checkpoint_is_passed_over_or_it_is_what_was_written(
    first: int, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daily.test_a_damaged_checkpoint_is_passed_over_or_it_is_what_was_written(first, trained, caplog)


@pytest.mark.parametrize("seed", range(7, 24, 4))
def test_a_run_goes_on_whatever_happened_to_its_newest_checkpoint(seed: int, trained: Path, train: Train) -> None:
    daily.test_a_run_goes_on_whatever_happened_to_its_newest_checkpoint(seed, trained, train)
