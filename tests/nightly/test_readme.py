"""The plan in README.md is what its command prints."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Train
from tests.engine.test_readme import README

((PLAN, TABLE),) = re.findall(r"^    \$ python (train\.py mode=plan .*)\n((?:    .*\n)+)", README, re.MULTILINE)


def test_the_plan_is_what_its_command_prints(train: Train, tmp_path: Path) -> None:
    """Its table is cut, at the right and below; of another version of torch, a number may differ a little."""
    folder = tmp_path / "plan"
    folder.mkdir()
    shutil.copy(CHECKOUT / "CHANGELOG.md", folder)  # its data
    printed = map(_cells, train(*shlex.split(PLAN)[1:], folder=folder).out.splitlines())
    for row in map(_cells, TABLE.removesuffix("    …\n").splitlines()):
        expected = [pytest.approx(cell, rel=0.02) if isinstance(cell, float) else cell for cell in row]
        assert any(found[: len(row)] == expected for found in printed), row  # in this order


def _cells(line: str) -> list[str | float]:
    """Cells of a table's row."""
    return [float(cell) if re.fullmatch(r"[\d.]+", cell) else cell for cell in re.split(r"\s{2,}", line.strip())]
