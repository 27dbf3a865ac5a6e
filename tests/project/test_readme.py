"""What README.md says can be typed, typed; and the files that it shows, written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.project.guide import commands, files, follow
from tests.runs import CHECKOUT, Train

README = (CHECKOUT / "README.md").read_text()


def test_the_readme_is_read_as_it_is_written() -> None:
    assert commands(README)
    assert len(files(README)) == README.count("```python\n") + README.count("```yaml\n")


@pytest.mark.parametrize("command", commands(README))
def test_its_commands_train(command: str, train: Train, tmp_path: Path) -> None:
    words = shlex.split(command, comments=True)
    assert "step 2/2" in follow(words, README, tmp_path / "typed", train).out
