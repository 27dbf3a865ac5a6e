import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT
from tests.engine.slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session", autouse=True)
def slurm() -> None:
    """No test of this folder begins where no cluster can come up; CI may skip none."""
    if reason := why_not():
        required = os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(reason)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    """Four nodes of 8 processors and 2 fake GPUs, and one of 4 GPUs."""
    with Cluster(nodes=4) as cluster:
        yield cluster


@pytest.fixture
def checkout(tmp_path: Path, python: Path) -> Path:
    """The checkout seen from a folder of the test's own, so that its runs stay there."""
    for name in ("train.py", "conf", "slurm"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / ".venv").symlink_to(python.parents[1])
    return tmp_path


@pytest.fixture
def read_only(slurm_cluster: Cluster) -> Iterator[Path]:
    """The checkout, which no node may write."""
    for node in slurm_cluster.nodes:
        _mount(slurm_cluster, node, "mount", "--bind", str(CHECKOUT), str(CHECKOUT))
        _mount(slurm_cluster, node, "mount", "-o", "remount,bind,ro", str(CHECKOUT))
    yield CHECKOUT
    for node in slurm_cluster.nodes:
        _mount(slurm_cluster, node, "umount", str(CHECKOUT))


def _mount(cluster: Cluster, node: int, *command: str) -> None:
    subprocess.run(["nsenter", f"--target={cluster.first_pids[f'node{node}']}", "--mount", *command], check=True)
