"""What the tests of a fork see of a model that breaks a promise, and why."""

from __future__ import annotations

import re

import pytest

from tests.engine.conftest import Train
from tests.project.promises import SAVED, SHORT, difference, expected, why

DATA = "data._target_=tests.engine.plain.PlainData"
BREAKING = {
    "BatchNormed": ("at step 0 .*", "^net.1: batch norm; .* use a norm over", ["batch norm"]),
    "Random": ("at step 0 .*", "^Python's random: noise by rank; draw it in the dataset", ["noise by rank"]),
    "Counting": ("at step 4 .*", "^seen: state in Python objects; keep it in a persistent buffer", []),
}


@pytest.mark.parametrize("model", BREAKING)
def test_a_model_that_breaks_a_promise_is_told_which_and_why(model: str, train: Train) -> None:
    words = (f"model._target_=tests.nightly.fork.breaking.{model}", DATA, *SHORT)
    alone = train(*words, "strategy=single")
    if model == "Counting":
        other = train(*words, "strategy=single", f"resume={alone.run_dir}/checkpoints/step_{SAVED}.ckpt")
    else:
        other = train(*words, "strategy=ddp", ranks=2)
    when, cause, of_table = BREAKING[model]
    assert re.match(f"{when}its train/loss is", difference(other, alone) or "")
    assert re.search(cause, why(alone))
    assert [*expected(alone)] == of_table


def test_a_model_that_keeps_its_promises_has_the_same_curve(train: Train) -> None:
    words = ("model._target_=tests.engine.plain.PlainModel", "model.dropout=0.5", DATA, *SHORT)
    alone, other = train(*words, "strategy=single"), train(*words, "strategy=ddp", ranks=2)
    assert difference(other, alone) is None
    assert expected(alone) == {}
