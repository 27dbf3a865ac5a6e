"""Promise 3, over and over: killed five times at moments that nobody chose, a run is the uninterrupted one."""

from __future__ import annotations

import pytest

from tests.engine.checkpoints.test_killed import WAYS, assert_survives
from tests.engine.conftest import Train


@pytest.mark.parametrize("way", WAYS)
def test_a_run_killed_over_and_over_is_the_uninterrupted_one_to_the_bit(way: str, train: Train) -> None:
    assert_survives(5, way, train)
