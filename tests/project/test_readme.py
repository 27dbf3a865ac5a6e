"""What README.md says can be typed, typed; and the files that it shows, written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.runs import CHECKOUT, Train

README = (CHECKOUT / "README.md").read_text()
SHORT = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")
COMMANDS = re.findall(r"^    python train\.py\b(.*)$", README, re.MULTILINE)
FILES = dict(re.findall(r"^```\w+\n# (?:src|conf)/(\S+\.(?:py|yaml))\n(.*?)^```", README, re.MULTILINE | re.DOTALL))


def test_the_readme_is_read_as_it_is_written() -> None:
    assert COMMANDS
    assert FILES


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_train(command: str, train: Train, tmp_path: Path) -> None:
    folder = _write_files(tmp_path / "typed")
    devices = re.search(r"trainer\.devices=(\d+)", command)  # of many, each would import all for itself
    added = ("--config-dir", str(folder))
    words = shlex.split(command, comments=True)
    finished = train(*words, *SHORT, *added, folder=folder, ranks=int(devices[1]) if devices else 0)
    assert "step 2/2" in finished.out


def _write_files(folder: Path) -> Path:
    """As a package of another name, for the one that it would be in is imported from where it lies."""
    modules = {path.removesuffix(".py").replace("/", ".") for path in FILES if path.endswith(".py")}
    for path, text in FILES.items():
        for module in modules:
            text = text.replace(module, f"shown.{module}")
        where = folder / (f"shown/{path}" if path.endswith(".py") else path)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
    return folder
