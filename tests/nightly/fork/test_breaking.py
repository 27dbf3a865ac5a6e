"""A model that breaks a promise is told which, and why."""

from __future__ import annotations

import re

import pytest

from tests.engine.conftest import Train
from tests.project.promises import SAVED, SHORT, assert_same_curve

DATA = "data._target_=tests.engine.plain.PlainData"
BREAKING = {
    "BatchNormed": "strategy and number of devices do not change the run: at step 0 .*BatchNorm1d.* use a GroupNorm",
    "Random": "strategy and number of devices do not change the run: at step 0 .*draws from Python's random, and every",
    "Counting": "a resumed run goes on as if it had not been interrupted: at step 4 .*keeps seen by itself",
}


@pytest.mark.parametrize("model", BREAKING)
def test_a_model_that_breaks_a_promise_is_told_which_and_why(model: str, train: Train) -> None:
    words = (f"model._target_=tests.nightly.fork.breaking.{model}", DATA, *SHORT)
    alone = train(*words, "strategy=single")
    if model == "Counting":
        other = train(*words, "strategy=single", f"resume={alone.run_dir}/checkpoints/step_{SAVED}.ckpt")
    else:
        other = train(*words, "strategy=ddp", ranks=2)
    with pytest.raises(AssertionError) as error:
        assert_same_curve(f"model={model}", "that", other, alone)
    assert re.search(rf"^model={model} breaks the promise that {BREAKING[model]}", str(error.value))


def test_a_model_that_keeps_its_promises_has_the_same_curve(train: Train) -> None:
    words = ("model._target_=tests.engine.plain.PlainModel", "model.dropout=0.5", DATA, *SHORT)
    alone, other = train(*words, "strategy=single"), train(*words, "strategy=ddp", ranks=2)
    assert_same_curve("model=plain", "ddp", other, alone)
