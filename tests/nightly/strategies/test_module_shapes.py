"""Each shape of module under each strategy; the daily tests have pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.strategies import test_module_shapes as daily
from tests.engine.strategies.test_module_shapes import Alone, alone
from tests.pool import Pool

__all__ = ["alone"]
pytestmark = daily.pytestmark


@pytest.mark.parametrize(("strategy", "shape"), daily.EVERY)
def test_a_shape_trains_resumes_tests_and_exports_as_in_one_process(
    strategy: str, shape: str, alone: Alone, pool: Pool, tmp_path: Path
) -> None:
    daily.test_a_shape_trains_resumes_tests_and_exports_as_in_one_process(strategy, shape, alone, pool, tmp_path)
