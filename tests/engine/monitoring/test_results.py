"""What is logged is held as Lightning holds it, in fewer calls, and without a profiler."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import MeanMetric

from lightswitch.monitoring.step_results import Results
from lightswitch.monitoring.step_timer import NoProfiler


def test_a_value_goes_to_the_device_of_the_next_one() -> None:
    results = Results(training=True)
    for device in ("cpu", "meta"):
        _log(results, torch.tensor(2.0, device=device))
        (held,) = results.values()
        places = (held.value, held.cumulated_batch_size, held._forward_cache)
        assert {place.device.type for place in places} == {device}


def test_a_metric_is_held_itself() -> None:
    results, metric = Results(training=True), MeanMetric()
    for value in (1.0, 3.0):
        metric(value)
        _log(results, metric)
    assert results.metrics(on_step=False)["callback"]["loss_epoch"] == 2


def test_a_step_and_its_epoch_show_what_lightning_shows() -> None:
    shown = []
    for results in (Results(training=True), _ResultCollection(training=True)):
        for value in (1.0, 2.0, 6.0):
            _log(results, torch.tensor(value))
        shown.append([{kind: dict(values) for kind, values in results.metrics(step).items()} for step in (True, False)])
    assert shown[0] == shown[1]
    assert shown[0][1]["callback"]["loss"] == 3


def test_a_value_that_is_where_it_was_is_logged_in_few_calls() -> None:
    assert _calls(Results(training=True)) < _calls(_ResultCollection(training=True)) / 3


def _log(results: _ResultCollection, value: Any) -> None:
    results.log("training_step", "loss", value, on_step=True, on_epoch=True, batch_size=1)


def _calls(results: _ResultCollection) -> int:
    """Return the calls in which a value is logged that was logged before."""
    _log(results, torch.tensor(1.0))
    counted, value = 0, torch.tensor(2.0)

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        _log(results, value)
    finally:
        sys.setprofile(before)
    return counted


def test_what_stands_in_for_a_profiler_nests_and_lets_errors_through() -> None:
    profiler = NoProfiler()
    with pytest.raises(KeyError), profiler.profile("epoch"), profiler.profile("step"):
        raise KeyError("a user's")
    assert profiler.summary() == ""
