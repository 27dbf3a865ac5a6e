"""What the suite may take is told package by package."""

from __future__ import annotations

from pathlib import Path

from tests.engine import budget

HERE = Path(__file__).parent


def test_every_package_of_tests_has_a_budget() -> None:
    folders = {path.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")}
    assert folders <= {name for name in budget.SECONDS if "." not in name}
    assert all((HERE / name).exists() for name in budget.SECONDS if name not in ("project", "others"))
    assert sum(budget.SECONDS.values()) <= 4 * 35 * 60


def test_a_package_that_takes_more_than_its_share_is_named() -> None:
    slurm, export = budget.SECONDS["slurm"], budget.SECONDS["export"]
    slow = [("tests/engine/slurm/test_sweep.py", 1.0 * slurm), ("tests/engine/export/test_load.py", 3.0 * export)]
    whole, over = budget.told(budget.by_package(slow))
    assert whole == f"{slurm + 3 * export} s of tests, of a budget of {slurm + export} s (tests/engine/budget.py)"
    assert over == f"over its budget: export: {3 * export} s of {export} s"


def test_a_slow_machine_is_no_reason_to_warn_of_each_package() -> None:
    slow = [(f"tests/engine/{name}", 2.0 * budget.SECONDS[name]) for name in ("slurm", "export", "fork")]
    assert budget.told(budget.by_package(slow))[1:] == []


def test_what_has_no_budget_of_its_own_is_counted_with_others() -> None:
    found = budget.by_package([("tests/engine/test_layout.py", 1.0), ("tests/project/test_choices.py", 2.0)])
    assert found == {"others": 1.0, "project": 2.0}
