import re
from pathlib import Path

import pytest

from tests.engine.fork.forks import clone_into, git


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return clone_into(tmp_path_factory.mktemp("clone"))


@pytest.fixture
def own_clone(tmp_path: Path) -> Path:
    return clone_into(tmp_path / "lightswitch")


@pytest.fixture
def newer(own_clone: Path) -> Path:
    """The engine a version later: with a file more and one less, and a word about it."""
    project = own_clone / "pyproject.toml"
    project.write_text(
        re.sub(r'^version = ".*"', 'version = "0.9.0"', project.read_text(), count=1, flags=re.MULTILINE)
    )
    log = own_clone / "CHANGELOG.md"
    log.write_text(log.read_text().replace("\n## ", "\n## [0.9.0]\n\n- Owls are heard.\n\n## ", 1))
    (own_clone / "src/lightswitch/owls.py").write_text('"""Owls."""\n')
    (own_clone / "src/lightswitch/py.typed").unlink()
    git(own_clone, "add", "--all")
    git(own_clone, "commit", "--quiet", "--message=Later")
    return own_clone
