"""The pictures of the documents: small, used, as new as their code, and read by a screen reader."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.engine.conftest import CHECKOUT
from tests.engine.tables import drawings
from tests.engine.tables.drawings import FOLDER, HELD

PAGES = [CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")]
DRAWN = drawings.drawings()
STRATEGIES = {path.stem for path in (CHECKOUT / "conf" / "strategy").glob("*.yaml")}
LARGEST_BYTES = 150_000
SVG = "{http://www.w3.org/2000/svg}"
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)|<img alt=\"([^\"]*)\" src=\"([^\"]+)\"|srcset=\"([^\"]+)\"")


def _shown(page: Path) -> list[tuple[str, Path]]:
    """The text in place of each picture of a page, which that for the dark has none of, and the picture's file."""
    found = PICTURE.findall(page.read_text())
    return [
        (text or other, (page.parent / (path or source or dark)).resolve()) for text, path, other, source, dark in found
    ]


def test_each_picture_is_small_and_shown_and_told_to_those_who_do_not_see_it() -> None:
    shown = [both for page in PAGES for both in _shown(page)]
    assert {path for _, path in shown} == {*FOLDER.iterdir()}
    assert [path for _, path in shown if path.stat().st_size > LARGEST_BYTES] == []
    assert [path for text, path in shown if len(text) < 40 and not path.stem.endswith("_dark")] == []
    for path in FOLDER.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        read = [root.find(f"{SVG}*[@id='{label}']") for label in root.attrib["aria-labelledby"].split()]
        assert [part.tag for part in read if len(part.text) > 20] == [f"{SVG}title", f"{SVG}desc"], path


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_as_new_as_its_code(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == DRAWN[name].svg(), "run python -m tests.engine.tables.drawings"


def test_the_drawings_name_strategies_that_are_there() -> None:
    named = {name for drawing in DRAWN.values() for name in re.findall(r"strategy=(\w+)", drawing.svg())}
    assert named | {name for names in HELD for name in names} <= STRATEGIES
