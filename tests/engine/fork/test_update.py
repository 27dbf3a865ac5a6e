"""A fork's engine is replaced by another."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from lightswitch.fork.update import news
from lightswitch.regular_files import make_tree
from tests.engine.fork.forks import git, made, run

BEFORE = """# Changelog

What changes.

## [Unreleased]

### Added
- Owls.

### Changed
- Songs are longer.

## [0.1.0]

### Added
- Songs.
"""
TABLE = """- **Names have changed.**

  | before | now |
  | --- | --- |
  | `owl` | `owls` |"""


def test_entries_of_one_kind_have_one_heading() -> None:
    assert news(BEFORE, BEFORE) == ""
    now = BEFORE.replace("- Owls.\n", "- Owls.\n- Larks.\n- Wrens.\n\n### Fixed\n- A note.\n")
    assert news(BEFORE, now) == "## [Unreleased]\n\n### Added\n- Larks.\n- Wrens.\n\n### Fixed\n- A note."
    now = BEFORE.replace("### Changed\n", f"### Changed\n{TABLE}\n")
    assert news(BEFORE, now) == f"## [Unreleased]\n\n### Changed\n{TABLE}"
    now = BEFORE.replace("## [Unreleased]", "## [Unreleased]\n\n## [0.2.0]")
    assert news(BEFORE, now).startswith("## [0.2.0]\n\n### Added\n- Owls.\n\n### Changed\n- Songs are longer.")


@pytest.fixture(scope="module")
def unchanged(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork; not to be changed."""
    folder = made(clone, tmp_path_factory.mktemp("fork") / "birdsong", "--bare")
    strategy = folder / "conf/strategy/deepspeed_stage_1.yaml"
    text = strategy.read_text().replace("lightswitch.deepspeed.strategy", "lightswitch.strategies.deepspeed")
    strategy.write_text(text)
    git(folder, "commit", "--all", "--quiet", "--message=As it was")
    return folder


@pytest.fixture
def birdsong(unchanged: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(unchanged, tmp_path / "birdsong", symlinks=True, ignore=ignored))


def update(folder: Path, source: str, code: int = 0, before: str = "") -> str:
    bash = f"{before} PYTHONPATH=src exec {sys.executable} -m lightswitch.fork.update '{source}'"
    return run(["bash", "-c", bash], folder, code=code)


def test_a_folder_that_was_changed_is_shown_and_stays_until_it_is_as_it_was(birdsong: Path, newer: Path) -> None:
    changed = birdsong / "src/lightswitch/errors.py"
    changed.write_text(changed.read_text() + "# mine\n")
    (birdsong / "src/lightswitch/mine.py").touch()
    git(birdsong, "add", "--all")
    git(birdsong, "commit", "--quiet", "--message=Mine")
    told = update(birdsong, str(newer), code=2)
    assert "+# mine" in told
    assert "error: found changes in src/lightswitch/errors.py and 1 more, which would be lost; revert them" in told
    assert git(birdsong, "status", "--porcelain") == ""
    back = re.search(r"\((git checkout .*; rm .*)\)", told)
    assert back is not None
    run(["bash", "-c", back[1]], birdsong)
    told = update(birdsong, str(newer))
    folder = birdsong / "src/lightswitch"
    manifest = json.loads((folder / "engine.json").read_text())
    assert (manifest["version"], manifest["commit"]) == ("0.9.0", git(newer, "rev-parse", "HEAD").strip())
    assert (folder / "owls.py").is_file()
    assert not (folder / "py.typed").exists()
    assert "0.9.0" in told.splitlines()[0]
    assert "## [0.9.0]\n- Owls are heard." in told
    assert (
        "conf/strategy/deepspeed_stage_1.yaml:4: lightswitch.strategies.deepspeed.DeepSpeed is now "
        "lightswitch.deepspeed.strategy.DeepSpeed"
    ) in told
    assert not others_than_the_engine(birdsong)
    git(birdsong, "add", "--all")
    assert "has nothing new" in update(birdsong, str(newer))


def others_than_the_engine(fork: Path) -> list[str]:
    changed = [line[3:] for line in git(fork, "status", "--porcelain").splitlines()]
    return [path for path in changed if not path.startswith(("src/lightswitch/", "docs/lightswitch/"))]


# By night


@pytest.mark.nightly
def test_what_a_fork_has_of_its_own_stays_and_its_news_are_listed(own_clone: Path, tmp_path: Path) -> None:
    birdsong = made(own_clone, tmp_path / "birdsong", "--bare")
    (own_clone / "conf/strategy/owls.yaml").write_text("# @package trainer\nstrategy: null\n")
    for path in ("conf/trainer/default.yaml", "conf/model/gpt.yaml"):  # of which a bare fork has the first alone
        (own_clone / path).write_text((own_clone / path).read_text() + "later: true\n")
    pyproject = re.sub(r'"(torchmetrics)>=.*"', r'"\1>=1.5"', (own_clone / "pyproject.toml").read_text(), count=1)
    pyproject = pyproject.replace("\ndependencies = [\n", '\ndependencies = [\n    "owls>=1",\n')
    (own_clone / "pyproject.toml").write_text(pyproject)
    (own_clone / "docs/owls.md").write_text("# Owls\n\n[Data](data.md), [tests](../tests/engine/plain.py)\n")
    git(own_clone, "add", "--all")
    git(own_clone, "commit", "--quiet", "--message=Later")
    told = update(birdsong, str(own_clone)).splitlines()
    beside = [line for line in told if line.startswith("beside ")]
    assert "beside     conf/strategy/owls.yaml: new in lightswitch; this fork's copy is unchanged" in beside
    assert "beside     conf/trainer/default.yaml: changed in lightswitch; this fork's copy is unchanged" in beside
    assert not [line for line in beside if "gpt" in line]
    assert (birdsong / "docs/lightswitch/owls.md").read_text() == "# Owls\n\n[Data](data.md), tests\n"
    put, replaced = (line for line in told if line.startswith("needs "))
    assert "owls>=1: add it to the dependencies" in put
    assert re.search(r"torchmetrics>=1.5: replace torchmetrics<.*,>=.* with it in the dependencies", replaced)
    assert not others_than_the_engine(birdsong)


def _wheel(folder: Path, **files: str) -> Path:
    path = folder / "lightswitch-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("lightswitch-0.9.0.dist-info/METADATA", "Version: 0.9.0\n")
        for name, content in {"__init__.py": "", **files}.items():
            wheel.writestr(f"lightswitch/{name}", content)
    return path


@pytest.mark.nightly
def test_what_is_no_engine_is_refused_and_nothing_is_written(unchanged: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    expected = {
        str(unchanged): "is a fork; name a checkout of lightswitch itself",
        "nowhere": "nowhere is not a folder, a wheel or a git address",
        str(tmp_path / "empty"): "found no",
        "": "name the new engine",
        "git+file:///nowhere@main": "git clone: ",
        "README.md.whl": "No such file",
    }
    for number, name in enumerate(("../mine.py", f"{tmp_path}/mine.py", "a/../../mine.py")):
        (tmp_path / str(number)).mkdir()
        wheel = _wheel(tmp_path / str(number), **{name: "mine"})
        expected[str(wheel)] = f"would write {name}, outside of the engine; use a wheel that pip built"
    for source, told in expected.items():
        assert told in update(unchanged, source, code=2).splitlines()[-1]
    assert git(unchanged, "status", "--porcelain") == ""
    assert not (tmp_path / "mine.py").exists()


@pytest.mark.nightly
def test_an_update_that_is_killed_or_that_the_disk_does_not_take_leaves_the_old_engine_whole(
    birdsong: Path, newer: Path, tmp_path: Path
) -> None:
    wheel = _wheel(tmp_path, **{"early.py": "", "large.py": "#" * 200_000})
    assert "File too large" in update(birdsong, str(wheel), code=2, before="ulimit -f 100;")
    assert git(birdsong, "status", "--porcelain", "--ignored") == ""
    for folder in (birdsong / "src/lightswitch", birdsong / "docs/lightswitch"):
        folder.rename(make_tree(folder.parent / ".lightswitch_update") / "old")
    bash = f"PYTHONPATH={newer}/src exec {sys.executable} -m lightswitch.fork.update nowhere"
    assert "nowhere is not a folder, a wheel or a git address" in run(["bash", "-c", bash], birdsong, code=2)
    assert git(birdsong, "status", "--porcelain", "--ignored") == ""
