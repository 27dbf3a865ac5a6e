"""After a run of all tests, what they took, of the budget of tests/engine/budget.py."""

from __future__ import annotations

import pytest

from tests.engine import budget


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS or config.option.keyword or config.option.markexpr:
        return
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    durations = [(it.nodeid.partition("::")[0], it.duration) for it in reports if isinstance(it, pytest.TestReport)]
    terminalreporter.section("seconds")
    for line in budget.told(budget.by_package(durations)):
        terminalreporter.line(line, yellow=line.startswith("over "))
