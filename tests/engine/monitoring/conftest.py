"""A clock that only tests move, so that what is said of speed does not follow the load of a machine."""

from __future__ import annotations

import pytest

from lightswitch.monitoring import step_times, throughput


class Clock:
    """Stands for `perf_counter`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the meter and of a step's phases, which stands still until a test moves it."""
    clock = Clock()
    monkeypatch.setattr(step_times, "perf_counter", clock)
    monkeypatch.setattr(throughput, "perf_counter", clock)
    return clock
