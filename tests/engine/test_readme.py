"""The mistakes, choices and commands of README.md's guides; its own are typed by tests/project/test_readme.py."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Train
from tests.project.guide import commands, files, follow
from tests.project.test_readme import README

RUNNING, ADD = ((CHECKOUT / "docs" / name).read_text() for name in ("running.md", "add.md"))
COMMANDS = [(command, page) for page in (RUNNING, ADD) for command in commands(page) if command not in commands(README)]
((PLAN, TABLE),) = re.findall(r"^    \$ python (train\.py mode=plan .*)\n((?:    .*\n)+)", README, re.MULTILINE)
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


def test_the_plan_is_what_its_command_prints(train: Train, tmp_path: Path) -> None:
    """Its table is cut, at the right and below; of another version of torch, a number may differ a little."""
    folder = tmp_path / "plan"
    folder.mkdir()
    shutil.copy(CHECKOUT / "CHANGELOG.md", folder)  # its data
    printed = map(_cells, train(*shlex.split(PLAN)[1:], folder=folder).out.splitlines())
    for row in map(_cells, TABLE.splitlines()):
        expected = [pytest.approx(cell, rel=0.02) if isinstance(cell, float) else cell for cell in row]
        assert any(found[: len(row)] == expected for found in printed), row  # in this order


def _cells(line: str) -> list[str | float]:
    """Cells of a table's row."""
    return [float(cell) if re.fullmatch(r"[\d.]+", cell) else cell for cell in re.split(r"\s{2,}", line.strip())]


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
