"""Which tests a whole run of `make test` takes by day: all that are fast or catch a mutant, and the others by turns.

A test's seconds are in seconds.json, which `--keep-seconds` writes (CONTRIBUTING.md). The slow tests are split into as
many days as fit the budget, and the night runs them all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FILE = TESTS / "seconds.json"
BUDGET_SECONDS = 4 * 13 * 60  # of the tests of `make test`, of which four run at a time; lint and types take two more
FAST_SECONDS = 2.0
REST = "all others"  # key of the sum of the tests that take less than a second each


@cache
def slow() -> frozenset[str]:
    """Return the tests that have turns."""
    return frozenset(test for tests in _days() for test in tests)


@cache
def of_day(day: int) -> frozenset[str]:
    """Return the slow tests that have their turn on a day; each has its turn once in `len(_days())` days."""
    days = _days()
    return frozenset(days[day % len(days)])


@cache
def _days() -> list[list[str]]:
    seconds: dict[str, float] = json.loads(FILE.read_text())
    return split(seconds, _catching())


def split(seconds: Mapping[str, float], always: frozenset[str]) -> list[list[str]]:
    """Return the slow tests of each day, of as few days as fit the budget, with about equal sums.

    Args:
        seconds: by test, as pytest names it.
        always: tests that run each day, with all their cases.
    """
    waiting = {
        test: took
        for test, took in seconds.items()
        if took >= FAST_SECONDS and test != REST and not {test, test.partition("[")[0]} & always
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
        found.setdefault((test.partition("::")[0], test.partition("[")[2]), []).append(test)
    return [(sum(seconds[test] for test in tests), tests) for tests in found.values()]


def _catching() -> frozenset[str]:
    """Return the tests that catch a fault of tests/mutants."""
    texts = (path.read_text() for path in sorted((TESTS / "mutants").glob("*.yaml")))
    return frozenset(re.findall(r"\btests/\S+\.py::[^\n\"']+", "\n".join(texts)))


def keep(seconds: Mapping[str, float]) -> None:
    """Write the seconds of a run's tests."""
    kept = {test: round(took, 1) for test, took in sorted(seconds.items()) if took >= 1}
    rest = sum(took for test, took in seconds.items() if test not in kept)
    FILE.write_text(json.dumps({REST: round(rest), **kept}, indent=0, ensure_ascii=False) + "\n")
