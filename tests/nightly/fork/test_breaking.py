"""What the tests of a fork see of a model that breaks a promise, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightswitch.checking.check import Check
from lightswitch.checking.runs import Starter
from lightswitch.checking.table import EQUAL_STARTS, RANKS, RESUMED, SAME_RUN, Found
from tests.project.promises import DEVICES, GLOBAL_BATCH, SHORT, STEPS, broken, expected, told_of, way
from tests.runs import CHECKOUT

BREAKING = {  # with its cause, the strategies that break a promise, and what is told
    "BatchNormed": ("batch norm", [], "do         type trainer.sync_batchnorm=true"),
    "Random": ("noise by rank", [], "do         draw it in the dataset"),
    "Counting": ("state in Python objects", ["single", "ddp"], "single, killed, resumed: "),
    "WrittenByShares": ("weights written outside of the optimizer", ["ddp", "fsdp"], "do         write to parameters"),
}


def _found(model: str, folder: Path) -> tuple[Check, Found]:
    words = (f"model._target_={model}", "data._target_=tests.engine.plain.PlainData", *SHORT)
    starter = Starter(CHECKOUT / "train.py", ["tests.preload"], {"OMP_NUM_THREADS": "1"})
    check = Check(starter, folder, words, STEPS, DEVICES, GLOBAL_BATCH)
    return check, check.briefly([way(name) for name in ("ddp", "fsdp")])


@pytest.mark.parametrize("model", BREAKING)
def test_a_model_that_breaks_a_promise_is_told_which_and_why(model: str, tmp_path: Path) -> None:
    check, found = _found(f"tests.nightly.fork.breaking.{model}", tmp_path)
    cause, ways, told = BREAKING[model]
    assert cause in [one.name for causes in found.causes.values() for one in causes], found
    assert broken(found, (*SAME_RUN, RANKS, EQUAL_STARTS, RESUMED)) == ways
    assert bool(expected(found)) == (not ways)
    assert told in told_of(check, found)


def test_a_model_that_keeps_its_promises_has_the_same_curve(tmp_path: Path) -> None:
    _, found = _found("tests.engine.plain.PlainModel", tmp_path)
    assert not broken(found, (*SAME_RUN, RANKS, EQUAL_STARTS, RESUMED))
    assert not any(found.causes.values())
