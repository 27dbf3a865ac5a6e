"""Around the tests: what needs a GPU; and which strategies each model trains under, and what refuses it."""

from __future__ import annotations

import pytest

from tests.runs import skip_without_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_gpus(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the tests of promises have told, each once."""
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    if told := dict.fromkeys(value for name, value in properties if name == "promises"):
        terminalreporter.section("promises")
        for line in told:
            terminalreporter.line(str(line))
