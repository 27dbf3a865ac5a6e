"""A fork's engine is replaced by another."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from lightswitch.regular_files import make_tree
from tests.engine.fork.forks import git, made, run


@pytest.fixture(scope="module")
def unchanged(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork; not to be changed."""
    folder = made(clone, tmp_path_factory.mktemp("fork") / "birdsong", "--bare")
    strategy = folder / "conf/strategy/deepspeed_stage_1.yaml"
    strategy.write_text(
        strategy.read_text().replace("lightswitch.deepspeed.strategy", "lightswitch.strategies.deepspeed")
    )
    git(folder, "commit", "--all", "--quiet", "--message=As it was")
    return folder


@pytest.fixture
def birdsong(unchanged: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(unchanged, tmp_path / "birdsong", symlinks=True, ignore=ignored))


def update(folder: Path, source: str, code: int = 0) -> str:
    bash = f"PYTHONPATH=src exec {sys.executable} -m lightswitch.fork.update '{source}'"
    return run(["bash", "-c", bash], folder, code=code)


@pytest.mark.parametrize("source", ["{}", "git+file://{}@main"])
def test_a_newer_engine_replaces_the_folder_and_tells_its_news(source: str, birdsong: Path, newer: Path) -> None:
    told = update(birdsong, source.format(newer))
    folder = birdsong / "src/lightswitch"
    manifest = json.loads((folder / "engine.json").read_text())
    assert manifest["version"] == "0.9.0"
    assert manifest["commit"] == git(newer, "rev-parse", "HEAD").strip()
    assert (folder / "owls.py").is_file()
    assert not (folder / "py.typed").exists()
    assert "0.9.0" in told.splitlines()[0]
    assert "## [0.9.0]\n- Owls are heard." in told
    assert (
        "conf/strategy/deepspeed_stage_1.yaml:4: lightswitch.strategies.deepspeed.DeepSpeed is now "
        "lightswitch.deepspeed.strategy.DeepSpeed"
    ) in told
    changed = [line[3:] for line in git(birdsong, "status", "--porcelain").splitlines()]
    assert all(path.startswith(("src/lightswitch/", "docs/lightswitch/")) for path in changed)
    git(birdsong, "add", "--all")
    assert "has nothing new" in update(birdsong, str(newer))


def test_what_a_fork_has_of_its_own_stays_and_its_news_are_listed(own_clone: Path, tmp_path: Path) -> None:
    folder = made(own_clone, tmp_path / "birdsong", "--bare")
    (own_clone / "conf/strategy/owls.yaml").write_text("# @package trainer\nstrategy: null\n")
    for path in ("conf/trainer/default.yaml", "conf/model/gpt.yaml"):  # of which a bare fork has the first alone
        (own_clone / path).write_text((own_clone / path).read_text() + "later: true\n")
    pyproject = (own_clone / "pyproject.toml").read_text()
    pyproject = re.sub(r'"(torchmetrics)>=.*"', r'"\1>=1.5"', pyproject, count=1)
    pyproject = pyproject.replace("\ndependencies = [\n", '\ndependencies = [\n    "owls>=1",\n')
    (own_clone / "pyproject.toml").write_text(pyproject)
    (own_clone / "docs/owls.md").write_text("# Owls\n\n[Data](data.md), [tests](../tests/engine/plain.py)\n")
    git(own_clone, "add", "--all")
    git(own_clone, "commit", "--quiet", "--message=Later")
    told = update(folder, str(own_clone)).splitlines()
    assert [line for line in told if line.startswith("beside ")] == [
        "beside     conf/strategy/owls.yaml: new in lightswitch; this fork's copy is unchanged",
        "beside     conf/trainer/default.yaml: changed in lightswitch; this fork's copy is unchanged",
    ]
    assert (folder / "docs/lightswitch/owls.md").read_text() == "# Owls\n\n[Data](data.md), tests\n"
    put, replaced = (line for line in told if line.startswith("needs "))
    assert "owls>=1: add it to the dependencies" in put
    assert re.search(r"torchmetrics>=1.5: replace torchmetrics<.*,>=.* with it in the dependencies", replaced)
    changed = [line[3:] for line in git(folder, "status", "--porcelain").splitlines()]
    assert all(path.startswith(("src/lightswitch/", "docs/lightswitch/")) for path in changed)


def test_a_folder_that_was_changed_is_shown_and_stays(birdsong: Path, newer: Path) -> None:
    changed = birdsong / "src/lightswitch/errors.py"
    changed.write_text(changed.read_text() + "# mine\n")
    (birdsong / "src/lightswitch/mine.py").touch()
    git(birdsong, "add", "--all")
    git(birdsong, "commit", "--quiet", "--message=Mine")
    before = git(birdsong, "rev-parse", "HEAD")
    told = update(birdsong, str(newer), code=2)
    assert "+# mine" in told
    assert "error: found changes in src/lightswitch/errors.py and 1 more, which would be lost; revert them" in told
    assert git(birdsong, "status", "--porcelain") == ""
    assert git(birdsong, "rev-parse", "HEAD") == before
    back = re.search(r"\((git checkout .*; rm .*)\)", told)
    assert back is not None
    run(["bash", "-c", back[1]], birdsong)
    update(birdsong, str(newer))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{birdsong}", "is a fork; name a checkout of lightswitch itself"),
        ("nowhere", "nowhere is not a folder, a wheel or a git address"),
        (".", "found no"),
        ("", "name the new engine"),
        ("git+file:///nowhere@main", "git clone: "),
        ("README.md.whl", "No such file"),
    ],
)
def test_what_is_no_engine_is_refused(source: str, told: str, unchanged: Path, tmp_path: Path) -> None:
    if source == ".":
        (tmp_path / "empty").mkdir()
        source = str(tmp_path / "empty")
    source = source.replace("{birdsong}", str(unchanged))
    assert told in update(unchanged, source, code=2).splitlines()[-1]
    assert git(unchanged, "status", "--porcelain") == ""


def _wheel(folder: Path, **files: str) -> Path:
    path = folder / "lightswitch-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("lightswitch-0.9.0.dist-info/METADATA", "Version: 0.9.0\n")
        for name, content in {"__init__.py": "", **files}.items():
            wheel.writestr(f"lightswitch/{name}", content)
    return path


@pytest.mark.parametrize("name", ["../mine.py", "{tmp}/mine.py", "a/../../mine.py"])
def test_a_wheel_that_would_write_elsewhere_is_refused(name: str, unchanged: Path, tmp_path: Path) -> None:
    name = name.format(tmp=tmp_path)
    told = update(unchanged, str(_wheel(tmp_path, **{name: "mine"})), code=2)
    assert f"would write {name}, outside of the engine; use a wheel that pip built" in told
    assert git(unchanged, "status", "--porcelain") == ""
    assert not (tmp_path / "mine.py").exists()


def test_what_a_killed_update_has_moved_is_put_back(birdsong: Path, newer: Path) -> None:
    for folder in (birdsong / "src/lightswitch", birdsong / "docs/lightswitch"):
        folder.rename(make_tree(folder.parent / ".lightswitch_update") / "old")
    bash = f"PYTHONPATH={newer}/src exec {sys.executable} -m lightswitch.fork.update nowhere"
    assert "nowhere is not a folder, a wheel or a git address" in run(["bash", "-c", bash], birdsong, code=2)
    assert git(birdsong, "status", "--porcelain", "--ignored") == ""


def test_an_update_that_the_disk_does_not_take_leaves_the_old_engine_whole(birdsong: Path, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, **{"early.py": "", "large.py": "#" * 200_000})
    bash = f"ulimit -f 100; PYTHONPATH=src exec {sys.executable} -m lightswitch.fork.update '{wheel}'"
    told = run(["bash", "-c", bash], birdsong, code=2)
    assert "File too large" in told
    assert git(birdsong, "status", "--porcelain", "--ignored") == ""
