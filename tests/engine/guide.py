"""A page that shows commands to type and files to write, as README.md does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.runs import Finished, Train

SHORT = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")


def commands(page: str) -> list[str]:
    """What follows `python train.py` in each of them."""
    return re.findall(r"^    python train\.py\b(.*)$", page, re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """Their texts, by the path below src or conf that is their first line."""
    return dict(re.findall(r"^```\w+\n# (?:src|conf)/(\S+\.(?:py|yaml))\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


def follow(words: list[str], page: str, folder: Path, train: Train) -> Finished:
    """Write the files into a folder, and train there for two steps by the words of a command."""
    _write(files(page), folder)
    count = next((word.partition("=")[2] for word in words if word.startswith("trainer.devices=")), "0")
    ranks = int(count)  # as torchrun starts them: of those that Lightning starts, each imports all for itself
    return train(*words, *SHORT, "--config-dir", str(folder), folder=folder, ranks=ranks)


def _write(texts: dict[str, str], folder: Path) -> None:
    """As a package of another name, for the one that it would be in is imported from where it lies."""
    folder.mkdir()
    modules = {path.removesuffix(".py").replace("/", ".") for path in texts if path.endswith(".py")}
    for path, text in texts.items():
        for module in modules:
            text = text.replace(module, f"shown.{module}")
        where = folder / (f"shown/{path}" if path.endswith(".py") else path)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
