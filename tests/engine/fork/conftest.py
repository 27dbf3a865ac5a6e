from pathlib import Path

import pytest

from tests.engine.fork.forks import clone_into


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return clone_into(tmp_path_factory.mktemp("clone"))


@pytest.fixture
def own_clone(tmp_path: Path) -> Path:
    return clone_into(tmp_path / "lightswitch")
