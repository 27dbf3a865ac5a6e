"""Around a run of tests: where temporary files go, which tests come first, and what the tests of each folder took."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from datetime import date

import pytest

from tests import turns
from tests.runs import skip_without_gpus

# the longest first, so that none is left to one worker alone at the end; those of Slurm, which wait a lot, in between
FIRST = ("slurm/test_preemption.py", "faults/", "slurm/test_multinode.py", "tours/", "test_promises.py", "slurm/")
FIRST += ("strategies/", "fork/", "launch/")
TURN = "TEST_TURN"  # a day's number: the slow tests that have their turn; empty: all
ALWAYS = "/test_promises.py::"  # the examples train under a strategy of each kind by day, and under all at night


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes that the run starts one temporary folder: those that a test kills leave theirs behind."""
    if hasattr(config, "workerinput"):
        return  # a worker inherits it, and the turn
    turn = os.environ.get(TURN) or date.today().toordinal()
    os.environ[TURN] = str(turn) if _is_whole(config) and not config.option.nightly else ""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps those of the last runs
    folder = tempfile.TemporaryDirectory(prefix="tests_", ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o1777)  # as the system's: some tests give up root
    os.environ["TMPDIR"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run tests/nightly, slow tests and cases marked nightly")
    parser.addoption("--keep-seconds", action="store_true", help="write what each test took to tests/seconds.json")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly: bool = config.option.nightly
    changed = turns.changed()
    wanted = [item for item in items if (_is_of_the_night(item) if nightly else _is_of_the_day(item, changed))]
    chosen = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = wanted
    items.sort(key=_turn)
    skip_without_gpus(items)


def _is_of_the_day(item: pytest.Item, changed: frozenset[str]) -> bool:
    if item.get_closest_marker("nightly") is not None:
        return False
    today, day = os.environ[TURN], turns.day_of(item.nodeid)
    has_turn = day is None or day == int(today or 0) % turns.count_of_days()
    return not today or has_turn or item.nodeid.partition("::")[0] in changed


def _is_of_the_night(item: pytest.Item) -> bool:
    """Whether it repeats, is slow, or has other parameters at night."""
    places = (ALWAYS, "tests/nightly/")
    is_here = any(place in item.nodeid for place in places)
    return is_here or item.get_closest_marker("nightly") is not None or turns.day_of(item.nodeid) is not None


def _is_whole(config: pytest.Config) -> bool:
    """Whether no tests were selected."""
    return config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword


def _turn(item: pytest.Item) -> int:
    path = item.nodeid.split("/", 2)[-1]  # below tests/engine or tests/nightly
    return next((number for number, beginning in enumerate(FIRST) if path.startswith(beginning)), len(FIRST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show who adds tests what they cost."""
    reports = [it for them in terminalreporter.stats.values() for it in them if isinstance(it, pytest.TestReport)]
    terminalreporter.section("seconds")
    terminalreporter.line(seconds((it.nodeid.partition("::")[0], it.duration) for it in reports))
    whole = sum(it.duration for it in reports)
    if _is_whole(config):
        budget = turns.BUDGET_SECONDS
        terminalreporter.line(f"{whole:.0f} s of tests, of a budget of {budget} s", yellow=whole > budget)
    if config.option.keep_seconds:
        took: Counter[str] = Counter()
        for report in reports:
            took[report.nodeid] += report.duration
        turns.keep(took)


def seconds(durations: Iterable[tuple[str, float]]) -> str:
    """Return what the tests of each folder took, of those below tests/engine each, the most first."""
    found: Counter[str] = Counter()
    for path, took in durations:
        found["/".join(path.split("/")[1:-1][:2])] += took
    return ", ".join(f"{folder} {took:.0f}" for folder, took in found.most_common())
