"""One command makes a project of one's own."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.engine.fork.forks import commit, fork, git, made, run
from tests.night import at_night

OURS = r"tests[./](?:engine|nightly)|benchmarks|\.ci/|docs/your-project/|\bproject\.(models|data)|src/project"
EXAMPLES = r"(?i)\b(gpt|vit|digits|python_source|fashion_mnist|openwebtext)\b"
OF_AN_INDEX = "--engine=lightswitch"


def _matches(pattern: str, texts: dict[str, str]) -> list[str]:
    return [f"{path}: {line}" for path, text in texts.items() for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.parametrize(
    ("name", "options"),  # names that are sorted before and after what is imported beside them
    [("ab", ()), *at_night(("zebra_finch", ("--bare",)))],
)
def test_a_fork_is_one_commit_that_names_nothing_of_ours(
    name: str, options: tuple[str, ...], clone: Path, tmp_path: Path
) -> None:
    folder = made(clone, tmp_path / name, OF_AN_INDEX, *options, name=name)
    assert git(folder, "log", "--format=%s").splitlines() == [f"Begin {name}"]
    assert git(folder, "status", "--porcelain") == ""
    paths = git(folder, "ls-files").splitlines()
    texts = {path: (folder / path).read_text() for path in paths if path != "constraints.txt"}
    assert not _matches(rf"{OURS}|{{{{(name|pin|pages)}}}}", texts)
    del texts["pyproject.toml"]  # an extra is named digits
    assert "--bare" not in options or not _matches(EXAMPLES, texts)
    assert f"src/{name}/__init__.py" in texts
    assert f"_target_: {name}.models" in "".join(texts.values())
    assert not (folder / "src/lightswitch").exists()
    for command in (["check"], ["format", "--check"]):
        checked = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=folder, capture_output=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *((f"{name} TMP/new", "is not a valid Python package name") for name in ("Bird", "bird-song", "class")),
        *((f"{name} TMP/new", "a package or file that the project uses") for name in ("tests", "json", "scikit_learn")),
        ("birdsong inside", "inside is inside the checkout"),
        ("birdsong TMP/full", "full is not an empty folder"),
        ("birdsong TMP/full/file", "file is not an empty folder"),
        ("birdsong", "name the package and a new folder"),
        ("birdsong --since=v9", "git rev-parse: "),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(arguments: str, told: str, clone: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    done = fork(clone, *arguments.replace("TMP", str(tmp_path)).split())
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*\n", done.stderr)
    assert told in done.stderr
    assert not (tmp_path / "new").exists()


def test_an_engine_that_no_host_has_comes_along_as_a_wheel_of_a_version_that_no_index_has(
    clone: Path, tmp_path: Path
) -> None:
    folder = made(clone, tmp_path / "birdsong", "--bare")
    (wheel,) = folder.glob("wheels/*")
    version = f"0.2.0+g{git(clone, 'rev-parse', 'HEAD')[:7]}"
    assert wheel.name == f"lightswitch-{version}-py3-none-any.whl"
    assert f'"lightswitch=={version}",' in (folder / "pyproject.toml").read_text()
    assert "lightswitch/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_what_changed_in_a_new_project_is_a_diff_that_a_fork_merges(own_clone: Path, tmp_path: Path) -> None:
    before = git(own_clone, "rev-parse", "HEAD").strip()
    birdsong = made(own_clone, tmp_path / "birdsong", f"--engine=lightswitch==0.2.0+g{before[:7]}", "--bare")
    mine = [birdsong / "conf/trainer/default.yaml", birdsong / "README.md"]  # the second names the engine's version
    for file in mine:
        file.write_text(f"# Mine.\n{file.read_text()}")
    commit(birdsong, "Mine")
    for path in ("conf/trainer/default.yaml", "conf/model/gpt.yaml", "docs/your-project/files/README.md"):
        (own_clone / path).write_text((own_clone / path).read_text() + "later: true\n")  # a bare fork has no gpt.yaml
    commit(own_clone, "Later")
    done = fork(own_clone, "birdsong", "--since", before, "--bare")
    assert done.returncode == 0, done.stderr
    (tmp_path / "template.diff").write_text(done.stdout)
    git(birdsong, "apply", "-3", str(tmp_path / "template.diff"))
    assert git(birdsong, "diff", "HEAD", "--name-only").split() == ["README.md", "conf/trainer/default.yaml"]
    for file in mine:
        assert file.read_text().startswith("# Mine.\n")
        assert file.read_text().endswith("later: true\n")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("echo mine > train.py", "found changes that are not committed: train.py; commit or stash them\n"),
        (
            "echo src/birdsong/ > .git/info/exclude; mkdir src/birdsong; echo > src/birdsong/__init__.py",
            "move it elsewhere\n",
        ),
    ],
)
def test_a_branch_of_the_clone_itself_does_not_take_what_is_not_committed(
    changes: str, told: str, own_clone: Path
) -> None:
    subprocess.run(["bash", "-ec", changes], cwd=own_clone, check=True)
    before = _files(own_clone)
    refused = fork(own_clone, "birdsong", ".", "--bare", OF_AN_INDEX)
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
    assert [*own_clone.glob("wheels/*.whl")]
    for gone in (
        "src/project/__init__.py",
        "src/lightswitch/__init__.py",
        "tests/engine/fits.py",
        "docs/your-project/taken.txt",
    ):
        assert not (own_clone / gone).exists(), gone
    assert "Begin" not in git(own_clone, "log", "--format=%s", "main")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://me:secret@host.example/lightswitch.git", "https://host.example/lightswitch.git"),
        ("git@host.example:us/lightswitch.git", "ssh://git@host.example/us/lightswitch.git"),
        ("/srv/lightswitch", None),  # which others may not have
    ],
)
def test_a_clone_of_what_others_reach_makes_a_fork_that_installs_the_engine_from_there(
    origin: str, address: str | None, own_clone: Path, tmp_path: Path
) -> None:
    git(own_clone, "remote", "add", "origin", origin)
    git(own_clone, "update-ref", "refs/remotes/origin/main", "HEAD")  # as a clone leaves it
    folder, head = made(own_clone, tmp_path / "birdsong", "--bare"), git(own_clone, "rev-parse", "HEAD").strip()
    assert (folder / "wheels").exists() == (address is None)
    assert (f'"lightswitch @ git+{address}@{head}",' in (folder / "pyproject.toml").read_text()) == bool(address)
    git(own_clone, "commit", "--quiet", "--allow-empty", "--message=Of my own, not pushed")
    assert made(own_clone, tmp_path / "later", "--bare").joinpath("wheels").is_dir()


@pytest.mark.nightly
def test_make_fork_prints_what_its_page_shows_and_links_lead_somewhere(clone: Path, tmp_path: Path) -> None:
    for words in ("NAME=zebra_finch", "INTO=../birdsong", ""):
        told = run(["make", "fork", *words.split()], clone, code=2)
        assert told.startswith("error: name the package and a new folder, as in make fork NAME=birdsong INTO=../bird")
    shown = re.search(
        r"^    \$ (make fork .*)\n((?:    .*\n)+)", (clone / "docs/your-project.md").read_text(), re.MULTILINE
    )
    assert shown is not None
    told = run(shown[1].replace("../", f"{tmp_path}/").split(" "), clone)
    masked, expected = r"\d+ files|\+g\w+", re.sub("^    ", "", shown[2], flags=re.MULTILINE)
    assert re.sub(masked, "", told.replace(f"{tmp_path}/", "../")) == re.sub(masked, "", expected)
    readme = tmp_path / "birdsong/README.md"
    links = re.findall(r"\]\(([^()#\s:]+)[)#]", readme.read_text())
    assert [link for link in links if not (readme.parent / link).exists()] == []
