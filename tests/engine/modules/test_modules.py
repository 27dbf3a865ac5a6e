"""Modules from elsewhere keep the promises as docs/reference/modules.md says; the night tries each under every way."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engine.modules.__main__ import CELLS, page
from tests.engine.modules.catalogue import CATALOGUE
from tests.engine.modules.open import OPEN
from tests.engine.modules.walk import WAYS, Cell, Walk, walk
from tests.engine.tables import documents
from tests.pool import Pool

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of which torch has some for what these modules do
TABLE = {name: {way: Cell(*cell) for way, cell in row.items()} for name, row in json.loads(CELLS.read_text()).items()}
EVERY = [(name, way) for name, row in TABLE.items() for way in row]
_TURNS = ("fsdp", "ddp", "fsdp", "ZeRO 3", "ddp", "fsdp", "ZeRO 2")  # DeepSpeed takes three times as long


def _a_day() -> Iterator[tuple[str, str]]:
    """Yield each second module under one way, of the next one by which it is not open."""
    for number, (name, row) in [*enumerate(TABLE.items())][::2]:
        ways = (*_TURNS[number % len(_TURNS) :], *_TURNS)
        if (way := next((way for way in ways if row[way].outcome in ("holds", "refused")), None)) is not None:
            yield name, way


@pytest.fixture(scope="session")
def walked(pool: Pool) -> Iterator[Walk]:
    with walk(pool) as made:
        yield made


@pytest.mark.parametrize(("name", "way"), [*_a_day()])
def test_a_module_trains_resumes_and_exports_as_the_page_says(name: str, way: str, walked: Walk) -> None:
    assert_as_told(name, way, walked)


def assert_as_told(name: str, way: str, walked: Walk, goes_back: bool = False) -> None:
    expected, found = TABLE[name][way], walked.cell(name, way, goes_back)
    if way in OPEN.get(name, ()):
        expected = Cell("holds", "")
    assert found.outcome == expected.outcome, found
    if expected.outcome == "refused":  # the sizes of tensors that follow are those of whichever rank is first
        assert found.told.partition(", which shards")[0] == expected.told.partition(", which shards")[0]


def test_the_page_is_that_of_its_cells() -> None:
    told = (documents.DOCS / "reference" / "modules.md").read_text()
    _, *lines = page(TABLE)  # without the day that it was made
    assert "\n".join(lines) in told


def test_the_page_has_every_module_under_every_way() -> None:
    assert list(TABLE) == list(CATALOGUE)
    for name, row in TABLE.items():
        assert [way for way in WAYS if way != "fsdp_tp" or CATALOGUE[name].cuts] == list(row)


def test_what_neither_holds_nor_is_refused_is_listed() -> None:
    found = {(name, way) for name, way in EVERY if TABLE[name][way].outcome not in ("holds", "refused")}
    assert found == {(name, way) for name, ways in OPEN.items() for way in ways}


def test_every_module_has_a_sentence() -> None:
    for entry in CATALOGUE.values():
        assert entry.sentence.endswith((".", ":")), entry.name
