"""A fork's engine is replaced by another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.engine.fork.forks import git, made, run


@pytest.fixture
def birdsong(clone: Path, tmp_path: Path) -> Path:
    folder = made(clone, tmp_path / "birdsong", "--bare")
    strategy = folder / "conf/strategy/deepspeed_stage_1.yaml"
    strategy.write_text(
        strategy.read_text().replace("lightswitch.deepspeed.strategy", "lightswitch.strategies.deepspeed")
    )
    git(folder, "commit", "--all", "--quiet", "--message=As it was")
    return folder


def _update(folder: Path, source: str, code: int = 0) -> str:
    bash = f"PYTHONPATH=src exec {sys.executable} -m lightswitch.fork.update '{source}'"
    return run(["bash", "-c", bash], folder, code=code)


@pytest.mark.parametrize("source", ["{}", "git+file://{}@main"])
def test_a_newer_engine_replaces_the_folder_and_tells_its_news(source: str, birdsong: Path, newer: Path) -> None:
    told = _update(birdsong, source.format(newer))
    folder = birdsong / "src/lightswitch"
    manifest = json.loads((folder / "engine.json").read_text())
    assert manifest["version"] == "0.9.0"
    assert manifest["commit"] == git(newer, "rev-parse", "HEAD").strip()
    assert (folder / "owls.py").is_file()
    assert not (folder / "py.typed").exists()
    assert "0.9.0" in told.splitlines()[0]
    assert "## [0.9.0]\n\n- Owls are heard." in told
    assert (
        "conf/strategy/deepspeed_stage_1.yaml:4: lightswitch.strategies.deepspeed.DeepSpeed is now "
        "lightswitch.deepspeed.strategy.DeepSpeed"
    ) in told
    changed = [line[3:] for line in git(birdsong, "status", "--porcelain").splitlines()]
    assert all(path.startswith("src/lightswitch/") for path in changed)
    git(birdsong, "add", "--all")
    assert "has nothing new" in _update(birdsong, str(newer))


def test_a_folder_that_was_changed_is_shown_and_stays(birdsong: Path, newer: Path) -> None:
    changed = birdsong / "src/lightswitch/errors.py"
    changed.write_text(changed.read_text() + "# mine\n")
    git(birdsong, "commit", "--all", "--quiet", "--message=Mine")
    before = git(birdsong, "rev-parse", "HEAD")
    told = _update(birdsong, str(newer), code=2)
    assert "+# mine" in told
    assert "error: src/lightswitch/errors.py was changed in this fork, and would be lost" in told
    assert git(birdsong, "status", "--porcelain") == ""
    assert git(birdsong, "rev-parse", "HEAD") == before


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("nowhere", "nowhere is no folder, no wheel and no git address"),
        (".", "found no"),
        ("", "name the new engine"),
        ("git+file:///nowhere@main", "git clone: "),
        ("README.md.whl", "No such file"),
    ],
)
def test_what_is_no_engine_is_refused(source: str, told: str, birdsong: Path, tmp_path: Path) -> None:
    if source == ".":
        (tmp_path / "empty").mkdir()
        source = str(tmp_path / "empty")
    assert told in _update(birdsong, source, code=2).splitlines()[-1]
    assert git(birdsong, "status", "--porcelain") == ""
