"""Fixtures of the tests of what a run shows and records."""

from __future__ import annotations

import pytest

from lightswitch.monitoring import throughput
from tests.engine.monitoring.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The meter's clock, which stands still until a test moves it."""
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    return clock
