"""A model is the same run under each kind of strategy that CPUs can run, and resumes under another.

Each file of conf/model that names a class is tested, with the first file of conf/data that it trains with, by the code
of mode=check. What it is expected to break, and may, is a table in promises.py. A fork has no
nightly tests, and runs these by day.
"""

from __future__ import annotations

import json

import pytest

from lightswitch.checking.table import ELSEWHERE, EQUAL_STARTS, RANKS, RESUMED, SAME_RUN
from tests.project.choices import models
from tests.project.promises import ACCEPTED, Checks, broken, expected, listed, refusals, told_of, way

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600), pytest.mark.parametrize("model", models())]


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    return Checks(tmp_path_factory.mktemp("promises"))


def test_a_model_is_the_same_run_under_every_strategy(
    model: str, checks: Checks, record_property: pytest.RecordProperty
) -> None:
    check, found = checks.of(model)
    refused, others = refusals(found), expected(found)
    differing = broken(found, (*SAME_RUN, RANKS))
    same = [name for name in found.cells if name not in refused and name not in others and name not in differing]
    shown = {name: told for name, told in refused.items() if " has no plan for " not in told}
    told = [f"the same run under {', '.join(same)}"]
    told += [f"another by {', '.join(dict.fromkeys(cause.name for cause in others.values()))}"] if others else []
    told += ["another by a cause that is told above"] if differing else []
    told += [f"refused by {listed(shown)}"] if shown else []
    record_property("promises", f"{model}: {'; '.join(told)}")
    if differing and model in ACCEPTED:
        pytest.xfail(f"{ACCEPTED[model]} ({', '.join(differing)})")
    if differing:
        promise = f"strategy and number of devices do not change the run, under {', '.join(differing)}"
        raise AssertionError(f"model={model} breaks the promise that {promise}:\n{told_of(check, found)}")
    if others:
        causes = dict.fromkeys(f"{cause.name}: {cause.told}; {cause.remedy}" for cause in others.values())
        pytest.xfail("; ".join(causes))
    if len(refused) == len(found.cells) - 1:
        pytest.skip(f"model={model} trains on one device alone, by what is told below the tests")


def test_a_model_resumes_under_another_strategy(model: str, checks: Checks) -> None:
    check, found = checks.of(model)
    if differing := broken(found, (EQUAL_STARTS, RESUMED, ELSEWHERE)):
        promise = f"a resumed run goes on as if it had not been interrupted, under {', '.join(differing)}"
        raise AssertionError(f"model={model} breaks the promise that {promise}:\n{told_of(check, found)}")


def test_what_is_frozen_costs_neither_gradients_nor_optimizer_state(model: str, checks: Checks) -> None:
    check, found = checks.of(model)
    for name, cells in found.cells.items():
        if cells[0].status not in ("refused", "failed"):
            held = json.loads((check.whole(way(name)).run_dir / "witness.json").read_text())
            assert held["frozen_gradients"] == [], name
            assert held["optimizer_elements"] <= 2 * held["trained_elements"] + 64, name  # Adam's averages; padding
