"""Each module from elsewhere under each way, resumed there and back; the daily tests have one way of each."""

from __future__ import annotations

import pytest

from tests.engine.modules import test_modules as daily
from tests.engine.modules.open import OPEN
from tests.engine.modules.test_modules import walked
from tests.engine.modules.walk import Walk

__all__ = ["walked"]
pytestmark = daily.pytestmark


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.xfail] if way in OPEN.get(name, ()) else [])
        for name, way in daily.EVERY
    ],
)
def test_a_module_trains_resumes_and_exports_as_the_page_says(name: str, way: str, walked: Walk) -> None:
    daily.assert_as_told(name, way, walked, goes_back=True)
