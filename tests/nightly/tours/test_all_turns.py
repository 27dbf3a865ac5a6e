"""What a night has time for: from every way to every other, and each cell of the matrix."""

from __future__ import annotations

import json

import pytest

from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.tables.matrix import CELLS, cell, devices
from tests.engine.tables.resume import END, difference, go_on
from tests.engine.tiny import MODELS, NO_CHECKPOINTS
from tests.engine.ways import WAYS

TRAINED = [(s, p) for s, row in json.loads(CELLS.read_text())["cpu"].items() for p in row if row[p] == "trains"]
STOPS = (3, 5, 7, 10, 13, END)  # steps; a validation follows every fourth
ROUND = [*WAYS, "single"]
REPLICAS = {"ddp": ("strategy=ddp", 2), "four": ("strategy=ddp", 4)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return go_on(runs_in(tmp_path_factory.mktemp("uninterrupted")), "single", None)


@pytest.mark.parametrize("first", [0, 5, 10])
def test_a_run_goes_on_under_one_strategy_after_another(first: int, uninterrupted: Finished, train: Train) -> None:
    ways, run = ROUND[first : first + 6], None
    for way, stop in zip(ways, STOPS[-len(ways) :], strict=True):
        run = go_on(train, way, run and run.folder, stop)
    assert run is not None
    assert difference(uninterrupted, run) <= 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_replicas_keep_the_losses_of_fifty_steps(model: str, train: Train) -> None:
    alone = train(*MODELS[model], *NO_CHECKPOINTS, "strategy=single")
    for strategy, ranks in REPLICAS.values():
        run = train(*MODELS[model], *NO_CHECKPOINTS, strategy, ranks=ranks)
        assert len(run.column("train/loss")) == 50
        assert largest_difference(run, alone) <= 1e-5


@pytest.mark.parametrize(("strategy", "precision"), TRAINED)
def test_what_trains_still_does(strategy: str, precision: str, train: Train) -> None:
    assert cell(train, "cpu", strategy, precision, devices(strategy)) == "trains"
