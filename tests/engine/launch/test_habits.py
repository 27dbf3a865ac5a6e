"""What Lightning's users have in their modules and fingers does what its name says, or a line says what to type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN_DATA, Finished, Train, runs_in
from tests.engine.launch.habits import ELSEWHERE, HABITS, PLAIN, RUNS, Habit

Ran = Callable[[str], Finished]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run of a name, which is started once."""
    train = runs_in(tmp_path_factory.mktemp("habits"))

    @cache
    def ran(name: str) -> Finished:
        typed = RUNS[name]
        before = ran(typed.after) if typed.after else None
        run = train(*typed.words, check=False, folder=before and before.folder)
        assert run.returncode == typed.code, f"{name}\n{run.out}\n{run.err}"
        return replace(run, run_id=typed.run_id)

    return ran


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.has)
def test_a_habit_has_its_effect_or_its_line(habit: Habit, ran: Ran) -> None:
    run = ran(habit.run)
    assert habit.told in (run.err if run.returncode else run.out)
    assert habit.look(run) == habit.found
    assert "Traceback" not in run.err


@pytest.mark.parametrize("habit", ELSEWHERE)
def test_a_habit_is_tried_elsewhere(habit: str) -> None:
    file, test = ELSEWHERE[habit]
    assert test in (CHECKOUT / "tests/engine" / file).read_text()


def test_there_are_as_many_habits_as_were_found() -> None:
    names = [*(habit.has for habit in HABITS), *ELSEWHERE]
    assert len(set(names)) == len(names) >= 60


def test_a_module_that_optimizes_by_hand_resumes_at_the_very_sample(ran: Ran) -> None:
    resumed, whole = ran("by hand, resumed").column("train/loss"), ran("by hand").column("train/loss")
    assert resumed == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("data.batch_size=8", "8 samples a step = 8 × 1 device × accumulation 1, from data.batch_size"),
        ("seed=1", "64 samples a step = 64 × 1 device × accumulation 1"),
    ],
)
def test_a_batch_size_that_data_bring_along_is_that_of_a_step(typed: str, told: str, train: Train) -> None:
    """But not to one who has typed that of the run."""
    run = train(f"model._target_={PLAIN}", PLAIN_DATA, "logger=csv", "trainer.max_steps=1", typed)
    assert f"batch      {told}\n" in run.out
    assert "is replaced by the global batch" not in run.out


def test_a_batch_size_that_no_argument_tells_is_said_to_be_replaced(train: Train) -> None:
    data = "data._target_=tests.engine.plain.FixedData"
    run = train(f"model._target_={PLAIN}", data, "logger=csv", "trainer.max_steps=1")
    line = "batch      24, of which a loader makes its batches, is replaced by the global batch of 64; to use it, type "
    assert run.out.count(f"{line}global_batch_size=24\n") == 1
