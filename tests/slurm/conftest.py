import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    """Four nodes of 8 processors and 2 fake GPUs; CI may not skip what asks for it."""
    if reason := why_not():
        required = os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(reason)
    with Cluster(nodes=4) as cluster:
        yield cluster
