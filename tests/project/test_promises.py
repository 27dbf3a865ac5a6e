"""A model is the same run under each kind of strategy that CPUs can run, and resumes under another.

Each file of conf/model that names a class is tested, with the first file of conf/data that it trains with. What it is
expected to break, and may, is a table in promises.py.
"""

from __future__ import annotations

import json

import pytest

from tests.project.choices import choices, models, text
from tests.project.promises import ACCEPTED, ALONE, KINDS, Runs, difference, expected, listed, pairs, refusal, why
from tests.runs import Finished, runs_in

pytestmark = [pytest.mark.timeout(1200), pytest.mark.parametrize("model", models())]
# auto stands for another strategy, and those that name a start method compute what ddp does
EVERY = [
    name for name in choices("strategy") if name not in ("auto", ALONE) and "start_method" not in text("strategy", name)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(runs_in(tmp_path_factory.mktemp("promises")))


@pytest.fixture
def strategies(request: pytest.FixtureRequest) -> list[str]:
    tried = EVERY if request.config.getoption("--nightly", False) else KINDS
    return [name for name in tried if name in EVERY]


def test_a_model_is_the_same_run_under_every_strategy(
    model: str, strategies: list[str], runs: Runs, record_property: pytest.RecordProperty
) -> None:
    alone = _alone(model, runs)
    told_of = {name: refusal(runs.under(model, name), name) for name in strategies}
    refused = {name: told for name, told in told_of.items() if told and " has no plan for " not in told}
    tried = [name for name, told in told_of.items() if not told]
    differing = {name: told for name in tried if (told := difference(runs.under(model, name), alone))}
    told = [f"the same run under {', '.join([ALONE, *(name for name in tried if name not in differing)])}"]
    told += [f"another by {', '.join(expected(alone)) or 'a cause that is told above'}"] if differing else []
    told += [f"refused by {listed(refused)}"] if refused else []
    record_property("promises", f"{model}: {'; '.join(told)}")
    if differing:
        _broken(model, f"strategy and number of devices do not change the run: {listed(differing)}", alone)
    if not tried:
        pytest.skip(f"model={model} trains on one device alone, by what is told below the tests")


def test_a_model_resumes_under_another_strategy(model: str, strategies: list[str], runs: Runs) -> None:
    alone = _alone(model, runs)
    follows_devices = bool(expected(alone)) or model in ACCEPTED
    savers = [name for name in (ALONE, "fsdp", "deepspeed_stage_3", "ddp") if name == ALONE or name in strategies]
    savers = [name for name in savers if not refusal(runs.under(model, name), name)]
    differing = {}
    for saver, reader in pairs(savers, follows_devices):
        run = runs.resumed(model, saver, reader)
        assert run.returncode == 0, run.out + run.err
        if told := difference(run, runs.under(model, reader) if follows_devices else alone):
            differing[f"{reader} from what {saver} saved"] = told
    if differing:
        told = f"a resumed run goes on as if it had not been interrupted: {listed(differing)}"
        raise AssertionError(f"model={model} breaks the promise that {told}. Why: {why(alone)}")


def test_what_is_frozen_costs_neither_gradients_nor_optimizer_state(
    model: str, strategies: list[str], runs: Runs
) -> None:
    _alone(model, runs)
    for name in (ALONE, *strategies):
        run = runs.under(model, name)
        if not refusal(run, name):
            held = json.loads((run.run_dir / "witness.json").read_text())
            assert held["frozen_gradients"] == [], name
            assert held["optimizer_elements"] <= 2 * held["trained_elements"] + 64, name  # Adam's averages; padding


def _alone(model: str, runs: Runs) -> Finished:
    run = runs.under(model, ALONE)
    assert run.returncode == 0, f"model={model} does not train on one device:\n{run.out}{run.err}"
    return run


def _broken(model: str, promise: str, alone: Finished) -> None:
    """Fail; or expect it, where the table of promises has the model, or what it has shown."""
    if model in ACCEPTED:
        pytest.xfail(f"{ACCEPTED[model]} ({promise})")
    if seen := expected(alone):
        pytest.xfail("; ".join(seen.values()))
    raise AssertionError(f"model={model} breaks the promise that {promise}. Why: {why(alone)}")
