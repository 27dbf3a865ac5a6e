"""Modules from elsewhere keep the promises as measured/modules.md says: twenty by day, the others at night."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engine.modules.__main__ import CELLS, page
from tests.engine.modules.catalogue import CATALOGUE
from tests.engine.modules.walk import WAYS, Cell, Walk, walk
from tests.engine.tables import documents
from tests.night import at_night
from tests.pool import Pool

pytest.importorskip("deepspeed")

TABLE = {name: {way: Cell(*cell) for way, cell in row.items()} for name, row in json.loads(CELLS.read_text()).items()}
BY_DAY = [  # each of another mechanism
    *((name, "ddp") for name in ("CLIP", "SimCLR", "GradientPenalty", "Word2Vec", "GraphNetwork")),
    *((name, "fsdp") for name in ("MoCo", "KNNMonitor", "LatentDiffusion", "VQEma", "GAN", "Checkpointed", "TBPTT")),
    *((name, "fsdp") for name in ("SpeechCTC", "DQN", "Detection", "AccumulatesByHand", "ScheduleFree", "Averaged")),
    *(("MultiTask", "ZeRO 2"), ("TiedLanguageModel", "ZeRO 3")),
]
OTHERS = [(name, way) for name, row in TABLE.items() for way in row if (name, way) not in BY_DAY]


@pytest.fixture(scope="session")
def walked(pool: Pool) -> Iterator[Walk]:
    with walk(pool) as made:
        yield made


@pytest.mark.filterwarnings("ignore")  # of which torch has some for what these modules do
@pytest.mark.parametrize(("name", "way"), [*BY_DAY, *at_night(*OTHERS)])
def test_a_module_trains_resumes_and_exports_as_the_page_says(name: str, way: str, walked: Walk) -> None:
    expected, found = TABLE[name][way], walked.cell(name, way, goes_back=(name, way) not in BY_DAY)
    assert found.outcome == expected.outcome, found
    if expected.outcome == "refused":  # the sizes of tensors that follow are those of whichever rank is first
        assert found.told.partition(", which shards")[0] == expected.told.partition(", which shards")[0]


def test_the_page_shows_that_every_module_holds_or_is_refused_under_every_way() -> None:
    assert list(TABLE) == list(CATALOGUE)
    for name, row in TABLE.items():
        assert [way for way in WAYS if way != "fsdp_tp" or CATALOGUE[name].cuts] == list(row)
        assert {cell.outcome for cell in row.values()} <= {"holds", "refused"}, name
    _, *lines = page(TABLE)  # without the day that it was made
    assert "\n".join(lines) in (documents.MEASURED / "modules.md").read_text()
