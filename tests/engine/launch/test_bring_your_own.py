"""What docs/coming-from-elsewhere.md says to type is taken, and the callbacks that are refused are on their page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from lightning.pytorch import callbacks

from lightswitch.strategies.callbacks import NOWHERE
from tests.engine.config.mistaken import refused
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import others

PAGE = (CHECKOUT / "docs" / "coming-from-elsewhere.md").read_text()
CODE = re.compile(r"`([^`]+)`")


def rows() -> Iterator[str]:
    """The last cell of each row of the page's tables: what is typed here."""
    for line in re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE):
        *_, here = line.split(" | ")
        yield here


def spans(here: str) -> list[list[str]]:
    """What a cell says to type to train.py: the words of each span of code."""
    spans = [
        [word for word in code.split() if "=" in word or word[0] == "~"]
        for code in CODE.findall(here)
        if "(" not in code
    ]
    return [span for span in spans if span]


def test_what_the_tables_say_to_type_is_taken(tmp_path: Path) -> None:
    found = [span for here in rows() for span in spans(here)]
    assert len(found) > 60
    assert refused(found, tmp_path) == {}


def test_the_callbacks_that_are_refused_are_on_the_page() -> None:
    page = (CHECKOUT / "docs" / "your-model-and-data.md").read_text()
    found = re.findall(r"^\| (`.*) \| (?:refused|`callbacks=)", page, re.MULTILINE)
    assert {*NOWHERE} <= {name for row in found for name in CODE.findall(row)} <= {*callbacks.__all__}


def test_the_comparison_with_others_is_its_list_and_names_those_that_are_better() -> None:
    assert others.PAGE.read_text() == others.text()
    verdicts = [row["better"] for row in yaml.safe_load(others.LIST.read_text())]
    assert {*verdicts} == {"here", "there", "equal"}
    assert verdicts.count("there") > verdicts.count("here")
