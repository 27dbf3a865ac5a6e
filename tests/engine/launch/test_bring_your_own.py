"""docs/your-own-code.md and docs/fork.md: their right columns can be typed, and callbacks do what the table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from lightswitch.config.overrides import GROUPS
from lightswitch.strategies.known_callbacks import NOWHERE, OF_ONE_PROCESS
from tests.engine.config.mistaken import refused
from tests.engine.conftest import CHECKOUT
from tests.engine.launch import habits
from tests.engine.launch.bring_your_own import CODE, SECTIONS, rows, shown_of_rows, spans, typed, words
from tests.engine.launch.habits import HABITS
from tests.engine.launch.migration_runs import Elsewhere, Habit, Inside, Left, Shown
from tests.engine.launch.migrations import ROWS

ELSEWHERE = [(row, shown) for row, _, shown in shown_of_rows() if isinstance(shown, Elsewhere | Habit)]


def test_what_the_tables_say_to_type_is_taken(tmp_path: Path) -> None:
    assert refused((span for name in SECTIONS for _, here in rows(name) for span in spans(here)), tmp_path) == {}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_has_a_table(section: str) -> None:
    assert len(list(rows(section))) >= 8


def test_the_table_of_callbacks_is_what_the_code_does() -> None:
    told = {CODE.findall(name)[0]: here for name, here in rows("Lightning's callbacks")}
    assert sorted(told) == sorted(callbacks.__all__)
    assert {name for name, here in told.items() if here.startswith("refused")} == set(NOWHERE)
    assert {name for name, here in told.items() if "refused on several devices" in here} == set(OF_ONE_PROCESS)


# Each row's effect


@pytest.mark.parametrize("section", SECTIONS)
def test_each_row_is_shown_and_nothing_else_is(section: str) -> None:
    assert [*ROWS] == SECTIONS
    assert list(ROWS[section]) == [there for there, _ in rows(section)]
    assert all(ROWS[section].values())


@pytest.mark.parametrize(("row", "shown"), ELSEWHERE, ids=[row for row, _ in ELSEWHERE])
def test_a_row_is_shown_by_a_test_that_is_there(row: str, shown: Elsewhere | Habit) -> None:
    assert _typed_of(shown)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_row_says_to_type_is_typed_where_its_effect_is_shown(section: str) -> None:
    untyped = {
        f"{there}: {word}"
        for there, here in rows(section)
        for word in words(here)
        if not any(_types(shown, word, here) for shown in ROWS[section][there])
    }
    assert untyped == set()


def _types(shown: Shown, word: str, here: str) -> bool:
    """A choice has to be the row's own; of other keys, values in the tables are examples."""
    if isinstance(shown, Inside | Left):
        return word in typed(here, shown)
    text, (key, _, choice) = _typed_of(shown), word.partition("=")
    part = shown.of_a_word if isinstance(shown, Elsewhere) else None
    is_put_together = part is not None and part in word and part in text
    if key in GROUPS:  # tests on the pool of ranks name a strategy and its options in one text
        return is_put_together or word in text or re.search(rf'"{re.escape(choice)}[" ]', text) is not None
    return is_put_together or f"{key}=" in text or f" {key.rpartition('.')[2]}=" in text


def _typed_of(shown: Elsewhere | Habit) -> str:
    if isinstance(shown, Elsewhere):
        text = (CHECKOUT / "tests" / shown.file).read_text()
        assert f"def {shown.test}(" in text, shown.test
        return text
    (habit,) = (habit for habit in HABITS if habit.has == shown.has)
    return " ".join(habits.RUNS[habit.run].words)
