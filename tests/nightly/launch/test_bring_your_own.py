"""Each row of docs/your-own-code.md and docs/fork.md has its effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.conftest import Finished, runs_in
from tests.engine.launch.bring_your_own import command, shown_of_rows
from tests.engine.launch.migration_runs import RUNS, Inside, Left

IN_RUNS = [(row, shown) for row, _, shown in shown_of_rows() if isinstance(shown, Inside | Left)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """The run of a name, which is started once."""
    folder = tmp_path_factory.mktemp("migrations")
    train = runs_in(folder)

    @cache
    def ran(name: str) -> Finished:
        before = RUNS[name].after
        own = ran(before).folder if before else folder / name
        own.mkdir(exist_ok=True)
        RUNS[name].write(own)
        return train(*command(name), folder=own)

    return ran


@pytest.mark.parametrize(("row", "shown"), IN_RUNS, ids=[row for row, _ in IN_RUNS])
def test_a_row_has_its_effect(row: str, shown: Inside | Left, ran: Callable[[str], Finished]) -> None:
    run = ran(shown.run)
    if isinstance(shown, Left):
        assert shown.look(run) == shown.found
    else:
        assert json.loads((run.folder / f"effects_{shown.run}.json").read_text())[row] == shown.found
