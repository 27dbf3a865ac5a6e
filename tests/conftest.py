"""Around a run of all tests: where temporary files go, and what it took of the budget of tests/engine/budget.py."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.engine import budget


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes that the run starts one temporary folder: those that a test kills leave theirs behind."""
    if hasattr(config, "workerinput"):
        return  # a worker inherits it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps those of the last runs
    folder = tempfile.TemporaryDirectory(prefix="tests_", ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o1777)  # as the system's: some tests give up root
    os.environ["TMPDIR"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS or config.option.keyword or config.option.markexpr:
        return
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    durations = [(it.nodeid.partition("::")[0], it.duration) for it in reports if isinstance(it, pytest.TestReport)]
    terminalreporter.section("seconds")
    for line in budget.told(budget.by_package(durations)):
        terminalreporter.line(line, yellow=line.startswith("over "))
