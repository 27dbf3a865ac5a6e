"""The day's tests fit their budget, and leave out none that catches a known fault."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests import turns
from tests.mutants.mutants import CHECKOUT, listed

SECONDS: dict[str, float] = json.loads(turns.FILE.read_text())


def test_each_slow_test_has_its_turn_once_and_each_day_fits_the_budget() -> None:
    days = turns.split(SECONDS, turns.always())
    waiting = [test for tests in days for test in tests]
    assert len(waiting) == len(set(waiting)) > 100
    daily = sum(SECONDS.values()) - sum(SECONDS[test] for test in waiting)
    for tests in days:
        assert daily + sum(SECONDS[test] for test in tests) <= 1.05 * turns.BUDGET_SECONDS


def test_what_catches_a_mutant_runs_each_day() -> None:
    catching = {test for mutant in listed() for test in mutant.caught_by}
    assert catching == set(turns.catching())
    assert not [test for test in catching if turns.day_of(test) is not None]


def test_what_judges_all_code_runs_each_day() -> None:
    judging = [test for test in SECONDS if test.partition("::")[0] in turns.OF_ALL_CODE]
    assert judging
    assert all((CHECKOUT / file).exists() for file in turns.OF_ALL_CODE)
    assert not [test for test in judging if turns.day_of(test) is not None]


def test_every_test_whose_seconds_are_kept_is_there() -> None:
    for test in SECONDS.keys() - {turns.REST}:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", (CHECKOUT / path).read_text(), re.MULTILINE), test


def test_a_fast_test_of_a_case_waits_with_a_slow_one() -> None:
    promises = "tests/project/test_promises.py::test_"
    day = turns.day_of(f"{promises}a_model_is_the_same_run_under_every_strategy[gpt]")
    assert day is not None
    assert turns.day_of(f"{promises}what_is_frozen_costs_neither_gradients_nor_optimizer_state[gpt]") == day
    assert turns.day_of("tests/engine/test_turns.py::test_of_nothing") is None


def test_a_long_test_takes_a_day_of_its_own_and_the_same_case_of_a_file_is_one() -> None:
    shares = {"a": 0.9, "b.py::x[1]": 0.3, "b.py::y[1]": 0.2, "c": 0.4}
    seconds = {test: turns.BUDGET_SECONDS * share for test, share in shares.items()} | {"d": 1.0}
    assert turns.split(seconds, frozenset()) == [["a"], ["b.py::x[1]", "b.py::y[1]", "c"]]
    assert turns.split(seconds, frozenset("c")) == [["a"], ["b.py::x[1]", "b.py::y[1]"]]


def test_files_that_a_change_touches_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        names = [f"{key}={value}" for key, value in (("user.name", "A"), ("user.email", "a@b"))]
        settings = [word for name in names for word in ("-c", name)]
        subprocess.run(["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(turns, "TESTS", tmp_path / "tests")
    assert turns.changed() == frozenset()
    git("init")
    (tmp_path / "tests").mkdir()
    for number, name in enumerate(("long_ago", "last", "not_yet", "never")):
        (tmp_path / "tests" / f"test_{name}.py").write_text("")
        git("add", "--all")
        git("commit", "--message", str(number))
    (tmp_path / "tests" / "test_last.py").write_text("changed")
    git("commit", "--all", "--message", "changed")
    (tmp_path / "tests" / "test_not_yet.py").write_text("changed")
    assert turns.changed() == {"tests/test_last.py", "tests/test_not_yet.py"}
