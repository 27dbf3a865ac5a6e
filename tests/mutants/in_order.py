"""A plugin of pytest that runs the files of tests in the order in which they were named."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns = {name.partition("::")[0]: turn for turn, name in reversed([*enumerate(config.args)])}
    items.sort(key=lambda item: turns[item.nodeid.partition("::")[0]])
