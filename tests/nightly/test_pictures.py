"""The pictures of the documents: small, used, and the drawings' text true, whole and there for a screen reader."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import findfont
from PIL import ImageFont

from tests.engine.conftest import CHECKOUT
from tests.engine.tables import drawings
from tests.engine.tables.drawings import FOLDER, HELD, MARGIN, WIDTH

PICTURES = sorted(path.name for path in FOLDER.iterdir())
PAGES = [CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")]
DRAWN = drawings.drawings()
STRATEGIES = {path.stem for path in (CHECKOUT / "conf" / "strategy").glob("*.yaml")}
LARGEST_BYTES = 150_000
SVG = "{http://www.w3.org/2000/svg}"
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)|<img alt=\"([^\"]*)\" src=\"([^\"]+)\"|srcset=\"([^\"]+)\"")


def _shown(page: Path) -> list[tuple[str, Path]]:
    """The text in place of each picture of a page, which that for the dark has none of, and the picture's file."""
    found = PICTURE.findall(page.read_text())
    return [(text or other, page.parent / (path or source or dark)) for text, path, other, source, dark in found]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_some_page_shows_it(name: str) -> None:
    assert (FOLDER / name).stat().st_size < LARGEST_BYTES
    assert any((FOLDER / name) == path.resolve() for page in PAGES for _, path in _shown(page))


def test_what_pages_show_is_there_and_told_to_those_who_do_not_see_it() -> None:
    shown = [(page.name, text, path) for page in PAGES for text, path in _shown(page)]
    assert len(shown) >= 10
    assert [path for _, _, path in shown if not path.exists()] == []
    assert [path for _, text, path in shown if len(text) < 40 and not path.stem.endswith("_dark")] == []


@pytest.mark.parametrize("name", [name for name in PICTURES if name.endswith(".svg")])
def test_a_drawing_is_well_formed_and_a_screen_reader_reads_it(name: str) -> None:
    root = ElementTree.parse(FOLDER / name).getroot()
    assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
    read = [root.find(f"{SVG}*[@id='{label}']") for label in root.attrib["aria-labelledby"].split()]
    assert [part.tag for part in read] == [f"{SVG}title", f"{SVG}desc"]
    assert all(len(part.text) > 20 for part in read)


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_as_new_as_its_code_and_has_colours_for_the_dark(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == DRAWN[name].svg(), "run python -m tests.engine.tables.drawings"
    assert "prefers-color-scheme: dark" in DRAWN[name].svg()


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_of_a_drawing_is_cut_nor_lies_on_another(name: str) -> None:
    """Measured in a font that is wider than most."""
    fonts = {size: ImageFont.truetype(findfont("DejaVu Sans"), size) for size in (12, 14)}
    bold = ImageFont.truetype(findfont("DejaVu Sans:bold"), 14)
    taken: dict[str, list[tuple[float, float]]] = {}
    for text in ElementTree.fromstring(DRAWN[name].svg()).iter(f"{SVG}text"):
        kinds = text.attrib["class"].split()
        wide = (bold if "strong" in kinds else fonts[12 if "small" in kinds else 14]).getlength(text.text)
        left = float(text.attrib["x"]) - {"middle": wide / 2, "end": wide}.get(text.get("text-anchor", ""), 0)
        assert left >= 0
        assert left + wide <= WIDTH - MARGIN / 2, text.text
        line = taken.setdefault(text.attrib["y"], [])
        assert all(left + wide <= begin or end <= left for begin, end in line), text.text
        line.append((left, left + wide))


def test_the_drawing_of_strategies_has_each_that_there_is_and_no_other() -> None:
    drawn = [name for names in HELD for name in names]
    # auto is one of the others, and what deepspeed does is in its file
    assert sorted(drawn) == sorted(STRATEGIES - {"auto", "deepspeed"})
    texts = " ".join(drawing.svg() for drawing in DRAWN.values())
    named = set(re.findall(r"strategy=(\w+)", texts))
    assert {"fsdp", "ddp"} <= named <= STRATEGIES
