import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.elastic.agents import PROGRAMS, Agents, Machines
from tests.engine.slurm.cluster import why_not


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Four machines and a head; CI may skip none."""
    if reason := why_not(PROGRAMS):
        required = os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(reason)
    with Machines(nodes=4) as made:
        yield made


@pytest.fixture
def agents(machines: Machines, tmp_path: Path, python: Path) -> Iterator[Agents]:
    made = Agents(machines, tmp_path, python)
    yield made
    made.end()
