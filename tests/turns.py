"""Which tests a whole run of `make test` takes by day: all that are fast or in `always`, and the others by turns.

A test's seconds are in seconds.json, which `--keep-seconds` writes (CONTRIBUTING.md). The slow tests are split into as
many days as fit the budget, and the night runs them all. Those of a file that has just been changed do not wait.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FILE = TESTS / "seconds.json"
BUDGET_SECONDS = 4 * 11 * 60  # of `make test`, of which four run at a time; and what a part of a file makes again
FAST_SECONDS = 2.0
OF_ALL_CODE = {f"tests/engine/test_{name}.py" for name in ("documents", "errors", "layout", "patches", "state")}
REST = "all others"  # key of the sum of the tests that take less than a second each


def day_of(test: str) -> int | None:
    """Return the day on which a test has its turn, from 0 to `count_of_days() - 1`; None if it runs each day.

    A fast test waits with a slow one of the same file and case, which may share a fixture that is slow to make.
    """
    turns = _turns()
    if test in turns.days:
        return turns.days[test]
    case = _case(test)
    return None if _is_among(test, always()) or not case[1] else turns.cases.get(case)


def count_of_days() -> int:
    return _turns().count


def changed(since: str = "HEAD~1") -> frozenset[str]:
    """Return the files of tests that a change touches, committed last or not yet, as git has it; none without git."""
    if shutil.which("git") is None:
        return frozenset()
    asked = ["git", "diff", "--name-only", "--relative", since, "--", TESTS.name]
    return frozenset(subprocess.run(asked, cwd=TESTS.parent, capture_output=True, text=True).stdout.splitlines())


@dataclass(frozen=True)
class _Turns:
    days: Mapping[str, int]  # by slow test
    cases: Mapping[tuple[str, str], int]  # by file and case
    count: int


@cache
def _turns() -> _Turns:
    split_up = split(json.loads(FILE.read_text()), always())
    days = {test: day for day, tests in enumerate(split_up) for test in tests}
    return _Turns(days, {_case(test): day for test, day in days.items()}, len(split_up))


def split(seconds: Mapping[str, float], always: frozenset[str]) -> list[list[str]]:
    """Return the slow tests of each day, of as few days as fit the budget, with about equal sums.

    Args:
        seconds: by test, as pytest names it.
        always: tests that run each day, with all their cases, and files of such tests.
    """
    waiting = {
        test: took
        for test, took in seconds.items()
        if took >= FAST_SECONDS and test != REST and not _is_among(test, always)
    }
    daily = sum(seconds.values()) - sum(waiting.values())
    room = max(BUDGET_SECONDS - daily, BUDGET_SECONDS / 10)
    days: list[list[str]] = [[] for _ in range(max(1, math.ceil(sum(waiting.values()) / room)))]
    sums = [0.0] * len(days)
    for took, tests in sorted(_together(waiting), reverse=True):  # the longest first
        least = sums.index(min(sums))
        days[least] += tests
        sums[least] += took
    return [tests for tests in days if tests]


def _together(seconds: Mapping[str, float]) -> list[tuple[float, list[str]]]:
    """Return the tests of each file and case, which may share a fixture, with their seconds."""
    found: dict[tuple[str, str], list[str]] = {}
    for test in sorted(seconds):
        found.setdefault(_case(test), []).append(test)
    return [(sum(seconds[test] for test in tests), tests) for tests in found.values()]


def _case(test: str) -> tuple[str, str]:
    """Return a test's file and case; the case is empty for a test that has one alone."""
    return test.partition("::")[0], test.partition("[")[2]


def _is_among(test: str, named: frozenset[str]) -> bool:
    """Return whether a test is named by its case, with all its cases, or by its file."""
    return not named.isdisjoint((test, test.partition("[")[0], test.partition("::")[0]))


@cache
def always() -> frozenset[str]:
    """Return the tests that run each day: they catch a mutant, or judge all code, so that any change can break them."""
    return catching() | OF_ALL_CODE


def catching() -> frozenset[str]:
    """Return the tests that catch a fault of tests/mutants."""
    texts = (path.read_text() for path in sorted((TESTS / "mutants").glob("*.yaml")))
    return frozenset(re.findall(r"\btests/\S+\.py::[^\n\"']+", "\n".join(texts)))


def keep(seconds: Mapping[str, float]) -> None:
    """Write the seconds of a run's tests."""
    kept = {test: round(took, 1) for test, took in sorted(seconds.items()) if took >= 1}
    rest = sum(took for test, took in seconds.items() if test not in kept)
    FILE.write_text(json.dumps({REST: round(rest), **kept}, indent=0, ensure_ascii=False) + "\n")
