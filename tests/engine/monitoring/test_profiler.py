"""What stands in for a profiler."""

from __future__ import annotations

from lightswitch.monitoring.step_timer import NoProfiler


def test_its_contexts_nest_and_let_errors_through() -> None:
    profiler = NoProfiler()
    raised = None

    try:
        with profiler.profile("epoch"), profiler.profile("step"):
            raise KeyError("a user's")
    except KeyError as error:
        raised = error

    assert raised is not None
    with profiler.profile("epoch"):
        pass
    assert profiler.summary() == ""
