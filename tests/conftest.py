"""Around a run of tests: which of two tiers runs, where temporary files go, and what the tests of each folder took."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable

import hypothesis
import pytest

from tests.runs import skip_without_gpus

# the longest first, so that none is left to one worker alone at the end; those of Slurm, which wait a lot, in between
FIRST = ("slurm/test_preemption.py", "faults/", "slurm/test_nodes.py", "tours/", "slurm/")
FIRST += ("strategies/", "fork/", "launch/", "checkpoints/", "examples/", "sweeps/", "planning/")
hypothesis.settings.register_profile("day", derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes that the run starts one temporary folder: those that a test kills leave theirs behind."""
    if not config.option.nightly:
        hypothesis.settings.load_profile("day")
    if hasattr(config, "workerinput"):
        return  # a worker inherits the folder
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps those of the last runs
    folder = tempfile.TemporaryDirectory(prefix="tests_", ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o1777)  # as the system's: some tests give up root
    os.environ["TMPDIR"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run tests/nightly and what is marked nightly, alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = tuple(name for name in config.args if "::" in name)  # runs by day and by night
    wanted = [
        item
        for item in items
        if _is_of_the_night(item) == config.option.nightly or (named and item.nodeid.startswith(named))
    ]
    chosen = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(wanted, key=_turn)
    skip_without_gpus(items)


def _is_of_the_night(item: pytest.Item) -> bool:
    return "tests/nightly/" in item.nodeid or item.get_closest_marker("nightly") is not None


def _turn(item: pytest.Item) -> int:
    path = item.nodeid.split("/", 2)[-1]  # below tests/engine or tests/nightly
    return next((number for number, beginning in enumerate(FIRST) if path.startswith(beginning)), len(FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("Type to repeat it", f'make test ARGS="{shlex.quote(item.nodeid)}"'))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show who adds tests what they cost."""
    reports = [it for them in terminalreporter.stats.values() for it in them if isinstance(it, pytest.TestReport)]
    terminalreporter.section("seconds")
    terminalreporter.line(seconds((it.nodeid.partition("::")[0], it.duration) for it in reports))


def seconds(durations: Iterable[tuple[str, float]]) -> str:
    """Return what the tests of each folder took, of those below tests/engine each, the most first."""
    found: Counter[str] = Counter()
    for path, took in durations:
        found["/".join(path.split("/")[1:-1][:2])] += took
    return ", ".join(f"{folder} {took:.0f}" for folder, took in found.most_common())
