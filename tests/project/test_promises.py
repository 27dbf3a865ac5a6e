"""A model has the same curve under every strategy that CPUs can run, and resumes under another.

Each file of conf/model that names a class is tested, with the first file of conf/data that it trains with.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.project.choices import choices, models, text
from tests.project.promises import ACCEPTED, ALONE, UNDER, Runs, assert_same_curve
from tests.runs import Finished, runs_in

# auto stands for another strategy, and those that name a start method compute what ddp does
STRATEGIES = [
    name for name in choices("strategy") if name not in ("auto", ALONE) and "start_method" not in text("strategy", name)
]
FOR_EVERY_MODEL = (ALONE, "ddp", "fsdp")  # the others may be refused for a model: that is skipped, and told
# By replicas, by torch's shards and by DeepSpeed's; the engine's own tests go from every strategy to every other
SAVERS = ["single", "fsdp", "deepspeed_stage_3", "ddp"]
SAVERS = [name for name in SAVERS if name in choices("strategy")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(runs_in(tmp_path_factory.mktemp("promises")))


def _tried(model: str, strategies: list[str]) -> list[str]:
    return [name for name in strategies if name in UNDER.get(model, (name,))]


def _transfers(model: str) -> list[tuple[str, str]]:
    """What each saves, the next resumes."""
    savers = _tried(model, SAVERS)
    return list(zip(savers, [*savers[1:], savers[0]], strict=True))


@pytest.mark.parametrize(
    ("model", "strategy"), [(model, name) for model in models() for name in _tried(model, STRATEGIES)]
)
def test_a_model_has_the_same_curve_under_every_strategy(model: str, strategy: str, runs: Runs) -> None:
    run, alone = (_trained(runs.under(model, name), name) for name in (strategy, ALONE))
    _compare(model, strategy, run, alone)


@pytest.mark.parametrize(
    ("model", "saver", "reader"), [(model, *pair) for model in models() for pair in _transfers(model)]
)
def test_a_model_resumes_under_another_strategy(model: str, saver: str, reader: str, runs: Runs) -> None:
    _, alone = (_trained(runs.under(model, name), name) for name in (saver, ALONE))
    run = _trained(runs.resumed(model, saver, reader), reader)
    _compare(model, f"{reader}, resumed from what {saver} saved", run, alone)


def _holders(model: str) -> list[str]:
    """The strategies under which what a model holds is looked at; all that it is tried under, where those are named."""
    tried = UNDER.get(model, (*FOR_EVERY_MODEL, "deepspeed_stage_2"))
    return [name for name in tried if name in (ALONE, *STRATEGIES)]


@pytest.mark.parametrize(("model", "strategy"), [(model, name) for model in models() for name in _holders(model)])
def test_what_is_frozen_costs_neither_gradients_nor_optimizer_state(model: str, strategy: str, runs: Runs) -> None:
    held = json.loads((_trained(runs.under(model, strategy), strategy).run_dir / "witness.json").read_text())
    assert held["frozen_gradients"] == []
    assert held["optimizer_elements"] <= 2 * held["trained_elements"] + 64  # Adam's two averages; padding


def _compare(model: str, under: str, run: Finished, alone: Finished) -> None:
    try:
        assert_same_curve(f"model={model}", under, run, alone)
    except AssertionError as error:
        if model in ACCEPTED:
            pytest.xfail(f"{ACCEPTED[model]}: {error}")
        raise


def _trained(run: Finished, strategy: str) -> Finished:
    lacks = " is not installed; " in run.err and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL")
    if run.returncode == 2 and (lacks or strategy not in FOR_EVERY_MODEL):
        pytest.skip(run.err.strip().splitlines()[-1])
    assert run.returncode == 0, run.out + run.err
    return run
