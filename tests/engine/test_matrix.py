"""Promise 1: what docs/strategies.md says of every strategy at every precision still holds on CPUs."""

from __future__ import annotations

import json

import pytest

from tests.engine.conftest import Train
from tests.engine.tables.matrix import CELLS, PRECISIONS, STRATEGIES, cell, devices

TABLE = json.loads(CELLS.read_text())["cpu"]
REFUSED = [(s, p) for s, row in TABLE.items() for p, found in row.items() if found != "trains"]
# each strategy once, and the precisions in turn
TRAINED = [
    (strategy, trains[index % len(trains)])
    for index, strategy in enumerate(TABLE)
    if (trains := [precision for precision, found in TABLE[strategy].items() if found == "trains"])
]


def test_the_table_is_of_all_strategies_and_precisions() -> None:
    assert list(TABLE) == STRATEGIES
    assert {strategy for strategy, _ in TRAINED} == {*STRATEGIES}
    assert all(tuple(row) == PRECISIONS for row in TABLE.values())


def test_nothing_fails_or_diverges() -> None:
    """A cell trains, or is refused by preflight; anything else would begin so."""
    odd = ("fails: ", "its loss is not finite")
    assert [(s, p, TABLE[s][p]) for s, p in REFUSED if TABLE[s][p].startswith(odd)] == []


@pytest.mark.parametrize(("strategy", "precision"), REFUSED)
def test_a_refusal_is_the_same_line_before_anything_starts(strategy: str, precision: str, train: Train) -> None:
    assert cell(train, "cpu", strategy, precision, devices(strategy)) == TABLE[strategy][precision]


@pytest.mark.parametrize(("strategy", "precision"), TRAINED)
def test_what_trains_still_does(strategy: str, precision: str, train: Train) -> None:
    assert cell(train, "cpu", strategy, precision, devices(strategy)) == "trains"
