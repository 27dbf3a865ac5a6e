"""docs/your-own-code.md and docs/fork.md: their right columns can be typed, and the table of callbacks is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import callbacks

from lightswitch.strategies.callbacks import NOWHERE, OF_ONE_PROCESS
from tests.engine.config.mistaken import refused
from tests.engine.conftest import CHECKOUT

PAGE = "\n".join((CHECKOUT / "docs" / name).read_text() for name in ("your-own-code.md", "fork.md"))
CODE = re.compile(r"`([^`]+)`")
SECTIONS = re.findall(r"^##+ (I .*)$", PAGE, re.MULTILINE)


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """The two cells of each row of a section's table."""
    (section,) = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]:
        there, here = line.split(" | ")
        if not there.startswith("---"):
            yield there, here


def spans(here: str) -> list[list[str]]:
    """What a cell says to type to train.py: the words of each span of code."""
    spans = [[word for word in code.split() if "=" in word or word[0] == "~"] for code in CODE.findall(here)]
    return [span for span in spans if span]


def test_what_the_tables_say_to_type_is_taken(tmp_path: Path) -> None:
    found = [span for name in SECTIONS for _, here in rows(name) for span in spans(here)]
    assert len(found) > 60
    assert refused(found, tmp_path) == {}


def test_the_table_of_callbacks_is_what_the_code_does() -> None:
    told = {CODE.findall(name)[0]: here for name, here in rows("Lightning's callbacks")}
    assert sorted(told) == sorted(callbacks.__all__)
    assert {name for name, here in told.items() if here.startswith("refused")} == set(NOWHERE)
    assert {name for name, here in told.items() if "refused on several devices" in here} == set(OF_ONE_PROCESS)
