"""A model is the same run under each kind of strategy that CPUs can run, and resumes, in one process as well.

Each file of conf/model that names a class is tested, with the first file of conf/data that it trains with, by the code
of mode=check. What it is expected to break, and may, is a table in promises.py. A fork has no nightly tests, and runs
these by day.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lightswitch.checking.check import EXPORTED, REMEDIES, table
from tests.project.promises import ACCEPTED, EXPECTED, broken, check_of, models, rows_of
from tests.runs import Train


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", models())
def test_a_model_is_the_same_run_under_every_strategy_and_resumes(
    model: str, train: Train, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    rows = rows_of(check_of(model, tmp_path, train))
    differing = {way: promises for way, row in rows.items() if (promises := broken(row))}
    refused = {way: row.cells[EXPORTED].reason for way, row in rows.items() if row.cells[EXPORTED].status == "refused"}
    causes = list(dict.fromkeys(name for row in rows.values() for name in row.causes if name in EXPECTED))
    same = [way for way, row in rows.items() if not row.causes and way not in differing | refused]
    told = [f"the same run under {', '.join(same)}"]
    told += [f"another by {', '.join(causes)}"] if causes else []
    told += [f"refused by {way}: {reason}" for way, reason in refused.items() if " has no plan for " not in reason]
    record_property("promises", f"{model}: {'; '.join(told)}")
    if differing and model in ACCEPTED:
        pytest.xfail(f"{ACCEPTED[model]} ({', '.join(differing)})")
    lines = (line for way, row in rows.items() for line in row.lines(way))
    assert not differing, "\n".join([f"model={model} breaks promises:", table(rows), *lines])
    if causes:
        pytest.xfail("; ".join(f"{name}: {REMEDIES[name]}" for name in causes))
