"""README.md's mistakes and choices; its commands are typed by tests/project/test_readme.py."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.engine.conftest import CHECKOUT, Train

README = (CHECKOUT / "README.md").read_text()

ERRORS = re.findall(r"^    \$ python (train\.py .*)\n    (error: .*)$", README, re.MULTILINE)


def test_the_readme_is_read_as_it_is_written() -> None:
    assert len(ERRORS) == 3


@pytest.mark.parametrize(("command", "error"), ERRORS)
def test_its_mistakes_are_told_as_it_shows_them(command: str, error: str, train: Train) -> None:
    finished = train(*shlex.split(command)[1:], check=False)
    assert finished.returncode == 2
    assert finished.err.strip() == error


def test_its_choices_and_folders_are_there() -> None:
    seen: set[str] = set()
    for group, row in re.findall(r"^\| (`[a-z`, ]+`) \| (.*) \|$", README, re.MULTILINE):
        names = re.findall(r"`([a-z0-9_]+)`", group)
        if not all((CHECKOUT / "conf" / name).is_dir() for name in names):
            continue  # the table of strategies
        seen.update(names)
        files = {path.stem for name in names for path in (CHECKOUT / "conf" / name).glob("*.yaml")}
        told = set(re.findall(r"[a-z0-9_]+", row.replace("-", "_")))
        assert {file.replace("-", "_") for file in files} - told <= _TOLD_OTHERWISE, group
    assert {"model", "data", "precision"} <= seen
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [path for path in links if not (CHECKOUT / path).exists()] == []


# switched on by `default` or a name that the row spells out in words
_TOLD_OTHERWISE = {"checkpoint", "progress", "lr_monitor", "model_summary", "csv", "tensorboard"}
