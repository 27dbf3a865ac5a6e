"""One command makes a project of one's own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightswitch.fork.update import news
from lightswitch.regular_files import make_tree
from tests.engine.fork.forks import fork, git, made, run
from tests.night import at_night

OURS = r"tests[./]engine|benchmarks|lightswitch\.fork (?!NAME)|\.ci/|template/|\bproject\.(models|data)|src/project"
EXAMPLES = r"(?i)\b(gpt\w*|vit|digits|python_source|fashion_mnist|openwebtext)\b"
PACKAGE = ("--engine=package", "--engine-from=git+file://{clone}@main")


def _texts(folder: Path) -> dict[str, str]:
    """All but the engine, its documents and what names packages."""
    paths = git(folder, "ls-files").splitlines()
    skipped = ("src/lightswitch/", "docs/lightswitch/", "constraints.txt")
    return {path: (folder / path).read_text() for path in paths if not path.startswith(skipped)}


def _matches(pattern: str, texts: dict[str, str]) -> list[str]:
    return [f"{path}: {line}" for path, text in texts.items() for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.parametrize(
    ("name", "options"),  # names that are sorted before and after what is imported beside them
    [("ab", ()), *at_night(("zebra_finch", (*PACKAGE, "--bare")), ("zebra_finch", ("--bare",)), ("ab", PACKAGE))],
)
def test_a_fork_is_one_commit_with_the_engine_that_names_nothing_of_ours(
    name: str, options: tuple[str, ...], clone: Path, tmp_path: Path
) -> None:
    folder = made(clone, tmp_path / name, *(option.format(clone=clone) for option in options), name=name)
    assert git(folder, "log", "--format=%s").splitlines() == [f"Begin {name}"]
    assert git(folder, "status", "--porcelain") == ""
    texts = _texts(folder)
    assert not _matches(rf"{OURS}|\{{\{{[#/\w]", texts)
    config = texts["conf/config.yaml"]
    model, data = (re.findall(rf"^  - {group}: (\w+)$", config, re.MULTILINE)[0] for group in ("model", "data"))
    assert f"trains `model={model}` on `data={data}`" in texts["README.md"]
    assert "--bare" not in options or not _matches(EXAMPLES, texts)
    assert f"src/{name}/__init__.py" in texts
    assert f"_target_: {name}.models" in "".join(texts.values())
    for command in (["check"], ["format", "--check"]):
        checked = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=folder, capture_output=True)
        assert checked.returncode == 0, checked.stdout
    if not {*PACKAGE} & {*options}:
        _assert_engine_of(clone, folder / "src/lightswitch")


def _assert_engine_of(clone: Path, engine: Path) -> None:
    manifest = json.loads((engine / "engine.json").read_text())
    assert manifest["commit"] == git(clone, "rev-parse", "HEAD").strip()
    paths = git(clone, "ls-files", "src/lightswitch").splitlines()
    assert manifest["files"].keys() == {path.removeprefix("src/lightswitch/") for path in paths}
    for path in manifest["files"]:
        assert (engine / path).read_bytes() == (clone / "src/lightswitch" / path).read_bytes(), path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *((f"{name} TMP/new", "is not a valid Python package name") for name in ("Bird", "bird-song", "class")),
        ("tests TMP/new", "is already used in the project"),
        ("json TMP/new", "is a module of Python's standard library"),
        ("sklearn TMP/new", "is the name of an installed package"),
        ("birdsong inside", "inside is inside the checkout"),
        ("birdsong TMP/full", "full is not empty"),
        ("birdsong TMP/full/file", "file is a file"),
        ("birdsong TMP/new --engine=package", "origin does not have this commit; push it, or type --engine-from="),
        ("birdsong TMP/new --engine=package --engine-from=newest", "newest is not a version, a wheel or a git"),
        ("birdsong TMP/new --engine=package --engine-from=none.whl", "found no wheel none.whl"),
        ("birdsong TMP/new --engine-from=0.1.0", "also type --engine=package"),
        ("birdsong TMP/new --engine=package --engine-from=git+file:///nowhere@main", "git ls-remote: "),
        ("birdsong TMP/new --engine=package --engine-from=git+file://CLONE@none", "found no none in file://"),
        ("birdsong", "the following arguments are required: INTO"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(arguments: str, told: str, clone: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    done = fork(clone, *arguments.replace("TMP", str(tmp_path)).replace("CLONE", str(clone)).split())
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*\n", done.stderr)
    assert told in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("echo mine > train.py", "found changes that are not committed: train.py; commit or stash them\n"),
        ("git update-index --skip-worktree train.py; echo mine > train.py", "train.py"),
        ("git update-index --assume-unchanged train.py; echo mine > train.py", "train.py"),
        ("git config status.showUntrackedFiles no; echo mine > mine.txt", "mine.txt"),
        (
            "echo src/birdsong/ > .git/info/exclude; mkdir src/birdsong; echo > src/birdsong/__init__.py",
            "move it elsewhere\n",
        ),
        (
            "git checkout -q --detach; git -c user.name=a -c user.email=b commit -q --allow-empty -m Mine",
            "found commits that are on no branch; create a branch for them first: git branch NAME\n",
        ),
    ],
)
def test_a_branch_of_the_clone_itself_does_not_take_what_is_not_committed(
    changes: str, told: str, own_clone: Path
) -> None:
    subprocess.run(["bash", "-ec", changes], cwd=own_clone, check=True)
    before = _files(own_clone)
    refused = fork(own_clone, "birdsong", ".", "--bare")
    assert refused.returncode == 2
    assert told in refused.stderr
    assert _files(own_clone) == before
    assert "birdsong" not in git(own_clone, "branch", "--format=%(refname:short)")


def _files(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not {".git", "__pycache__"} & {*path.parts})
    return {path: path.read_bytes() for path in paths}


@pytest.mark.nightly
def test_a_branch_of_the_clone_itself_can_be_the_project(own_clone: Path) -> None:
    (own_clone / "runs").mkdir()
    (own_clone / "runs/mine").touch()
    made(own_clone, Path(), "--bare")
    assert git(own_clone, "branch", "--show-current") == "birdsong\n"
    assert git(own_clone, "log", "--format=%s") == "Begin birdsong\n"
    assert git(own_clone, "status", "--porcelain") == ""
    assert (own_clone / "runs/mine").exists()
    for gone in ("src/project", "tests/engine", "benchmarks", "template"):
        assert not (own_clone / gone).exists(), gone
    assert "Begin" not in git(own_clone, "log", "--format=%s", "main")
    assert "found no checkout of lightswitch" in fork(own_clone, "owls", ".").stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://me:secret@host.example/lightswitch.git", "https://host.example/lightswitch.git"),
        ("git@host.example:us/lightswitch.git", "ssh://git@host.example/us/lightswitch.git"),
        ("/srv/lightswitch", None),  # which others may not have
    ],
)
def test_a_clone_of_what_others_reach_makes_a_fork_with_a_package(
    origin: str, address: str | None, own_clone: Path, tmp_path: Path
) -> None:
    git(own_clone, "remote", "add", "origin", origin)
    git(own_clone, "update-ref", "refs/remotes/origin/main", "HEAD")  # as a clone leaves it
    folder, commit = made(own_clone, tmp_path / "birdsong", "--bare"), git(own_clone, "rev-parse", "HEAD").strip()
    assert (folder / "src/lightswitch").exists() == (address is None)
    assert (f'"lightswitch @ git+{address}@{commit}",' in (folder / "pyproject.toml").read_text()) == bool(address)
    git(own_clone, "commit", "--quiet", "--allow-empty", "--message=Of my own, not pushed")
    assert made(own_clone, tmp_path / "later", "--bare").joinpath("src/lightswitch").is_dir()
    git(own_clone, "tag", "--annotate", "--message=One", "v1", commit)
    tagged = made(own_clone, tmp_path / "one", "--engine=package", f"--engine-from=git+file://{own_clone}@v1")
    assert f'"lightswitch @ git+file://{own_clone}@{commit}",' in (tagged / "pyproject.toml").read_text()


@pytest.mark.nightly
def test_make_fork_prints_what_its_page_shows_and_links_lead_somewhere(clone: Path, tmp_path: Path) -> None:
    for words in ("NAME=zebra_finch", "INTO=../birdsong", ""):
        told = run(["make", "fork", *words.split()], clone, code=2)
        assert told.startswith("error: name the package and a new folder, as in make fork NAME=birdsong INTO=../bird")
    shown = re.search(r"^    \$ (make fork .*)\n((?:    .*\n)+)", (clone / "docs/fork.md").read_text(), re.MULTILINE)
    assert shown is not None
    told = run(shown[1].replace("../", f"{tmp_path}/").split(" "), clone)
    masked, expected = r"\d+ files|commit \w+", re.sub("^    ", "", shown[2], flags=re.MULTILINE)
    assert re.sub(masked, "", told.replace(f"{tmp_path}/", "../")) == re.sub(masked, "", expected)
    documents = [path for path in (tmp_path / "birdsong").rglob("*.md") if path.name != "CHANGELOG.md"]
    links = [(page, link) for page in documents for link in re.findall(r"\]\(([^()#\s:]+)[)#]", page.read_text())]
    assert len(links) > 250
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []


# A fork's engine is replaced by another


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
