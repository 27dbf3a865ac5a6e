"""The mistakes, choices and commands of README.md's guides; its own are typed by tests/project/test_readme.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Train
from tests.project.guide import commands, files, follow
from tests.project.test_readme import README

RUNNING, ADD = ((CHECKOUT / "docs" / name).read_text() for name in ("running.md", "add.md"))
COMMANDS = [(command, page) for page in (RUNNING, ADD) for command in commands(page) if command not in commands(README)]
ERRORS = re.findall(r"^    \$ python (train\.py .*)\n    (error: .*)$", RUNNING, re.MULTILINE)


def test_the_first_screen_is_one() -> None:
    assert len(README.splitlines()) <= 90
    assert len(re.findall(r"\]\(docs/[\w/-]+\.md\)", README)) >= 25


def test_every_page_is_found_from_the_first() -> None:
    pages = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "docs").rglob("*.md")}
    assert pages - {*re.findall(r"\]\((docs/[^)#]+)", README)} == {"docs/index.md"}


def test_the_guides_are_read_as_they_are_written() -> None:
    assert len(ERRORS) == 3
    assert len(COMMANDS) >= 4
    assert len(files(ADD)) == ADD.count("```") / 2 == 4


@pytest.mark.parametrize(("command", "error"), ERRORS)
def test_mistakes_are_told_as_the_guide_shows_them(command: str, error: str, train: Train) -> None:
    finished = train(*shlex.split(command)[1:], check=False)
    assert finished.returncode == 2
    assert finished.err.strip() == error


@pytest.mark.parametrize(("command", "page"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_of_the_guides_train(command: str, page: str, train: Train, tmp_path: Path) -> None:
    assert "step 2/2" in follow(shlex.split(command), page, tmp_path / "typed", train).out


def test_every_choice_is_in_the_guide() -> None:
    seen: set[str] = set()
    for group, row in re.findall(r"^\| (`[a-z`, ]+`) \| (.*) \|$", RUNNING, re.MULTILINE):
        names = re.findall(r"`([a-z0-9_]+)`", group)
        seen.update(names)
        files = {path.stem for name in names for path in (CHECKOUT / "conf" / name).glob("*.yaml")}
        told = set(re.findall(r"[a-z0-9_]+", row.replace("-", "_")))
        assert {file.replace("-", "_") for file in files} - told <= _TOLD_OTHERWISE, group
    assert {"model", "data", "precision"} <= seen


# switched on by `default` or a name that the row spells out in words
_TOLD_OTHERWISE = {"checkpoint", "progress", "lr_monitor", "model_summary", "csv", "tensorboard"}
