"""Promise 1: any two choices either train together, as they do in one process, or are refused with a line."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.requests import composed, composing, problems
from tests.engine.tables import matrix
from tests.engine.tours.pairs import PRECISIONS, REFUSED, RING, STRATEGIES, Row, all_pairs, pairs_of, rows
from tests.runs import largest_difference

SHORT = (*WITNESS, "run_id=mine", "trainer.max_steps=4", "trainer.val_check_interval=2")
EXACT = ("32-true", "64-true")
ROUNDED = 0.05  # of losses of about 4, whose last bit in bfloat16 is 0.03
CLASSES = {"single": "Single", "ddp": "DDP", "fsdp": "FSDP", "fsdp_tp": "TensorParallel"}
NOT_BY_DAY = ("single", "fsdp", "fsdp_tp", "ZeRO 1", "ZeRO 2")  # what the tours of the day take besides
OF_THE_DAY = {row.values[0]: row for row in reversed(rows()) if row.values[-1] == "eager"}  # one of each kind
Alone = Callable[[str, str], Finished]


def test_every_pair_of_choices_is_in_a_run_or_refused() -> None:
    covered = set().union(*(pairs_of(row.values) for row in rows()))
    assert covered == all_pairs() - REFUSED.keys()


@pytest.mark.nightly
def test_every_strategy_is_in_a_run() -> None:
    words = {word for way in RING.values() for word in way.switches}
    in_ring = {word.partition("=")[2] for word in words if word.startswith("strategy=")}
    assert {row.strategy for row in rows()} | in_ring == {*matrix.STRATEGIES}


def _refusals() -> list[ParameterSet]:
    marks = [pytest.mark.nightly if strategy in ("ZeRO 1", "ZeRO 2") else () for strategy, _ in REFUSED]
    return [pytest.param(pair, id=" and ".join(pair), marks=it) for pair, it in zip(REFUSED, marks, strict=True)]


@pytest.mark.parametrize("pair", _refusals())
def test_choices_that_do_not_go_together_are_refused_with_a_line(pair: tuple[str, str], tmp_path: Path) -> None:
    strategy, other = pair
    precision, shape = (other, "tied") if other in PRECISIONS else ("32-true", other)
    for choice in STRATEGIES[strategy]:
        row = Row((strategy, precision, shape, "whole", "trainable only", "eager"), choice)
        with composing():
            (line,) = problems(composed(*row.words(), "trainer.devices=2", into=tmp_path))
        assert line.startswith(REFUSED[pair])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A run of a precision and a shape in one process, with all else as usual."""

    @cache
    def run(precision: str, shape: str) -> Finished:
        row = Row(("single", precision, shape, "whole", "trainable only", "eager"), "single")
        return runs_in(tmp_path_factory.mktemp("alone"))(*row.words(), *SHORT)

    return run


def _case(row: Row) -> ParameterSet:
    is_of_the_day = OF_THE_DAY[row.values[0]] is row and row.values[0] not in NOT_BY_DAY
    name = " ".join((row.strategy, *row.values[1:]))
    return pytest.param(row, id=name, marks=() if is_of_the_day else pytest.mark.nightly)


@pytest.mark.parametrize("row", [_case(row) for row in rows()])
def test_choices_that_go_together_train_as_one_process_does(row: Row, alone: Alone, train: Train) -> None:
    strategy, precision, shape, _, callbacks, _ = row.values
    run = train(*row.words(), *SHORT, ranks=row.ranks)
    for metric in ("train/loss", *(() if callbacks == "averages" else ("val/loss", "test/loss"))):
        assert largest_difference(run, alone(precision, shape), metric) <= (1e-5 if precision in EXACT else ROUNDED), (
            metric
        )
    seen = witnesses(run.run_dir)
    assert {rank["strategy"] for rank in seen} == {CLASSES.get(strategy, "DeepSpeed")}
    assert {rank["precision"] for rank in seen} == {precision}
    assert len(seen) == (2 if row.strategy == "ddp_spawn" else max(1, row.ranks))
