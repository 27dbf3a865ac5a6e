"""One command makes a project of one's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Train
from tests.engine.fork.forks import fork, git, made, run
from tests.night import at_night

OURS = r"tests[./]engine|benchmarks|lightswitch\.fork (?!NAME)|\.ci/|template/|\bproject\.(models|data)|src/project"
EXAMPLES = r"(?i)\b(gpt\w*|vit|digits|python_source|fashion_mnist|openwebtext)\b"


PACKAGE = ("--engine=package", "--engine-from=git+file://{clone}@main")


def _default(group: str, texts: dict[str, str]) -> str:
    return re.findall(rf"^  - {group}: (\w+)$", texts["conf/config.yaml"], re.MULTILINE)[0]


def _texts(folder: Path) -> dict[str, str]:
    """All but the engine, its documents and what names packages."""
    paths = git(folder, "ls-files").splitlines()
    skipped = ("src/lightswitch/", "docs/lightswitch/", "constraints.txt")
    return {path: (folder / path).read_text() for path in paths if not path.startswith(skipped)}


def _matches(pattern: str, texts: dict[str, str]) -> list[str]:
    return [f"{path}: {line}" for path, text in texts.items() for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.parametrize(
    ("name", "options"),  # names that are sorted before and after what is imported beside them
    [("ab", ()), ("zebra_finch", (*PACKAGE, "--bare")), *at_night(("zebra_finch", ("--bare",)), ("ab", PACKAGE))],
)
def test_a_fork_is_one_commit_that_names_nothing_of_ours(
    name: str, options: tuple[str, ...], clone: Path, tmp_path: Path
) -> None:
    options = tuple(option.format(clone=clone) for option in options)
    folder = made(clone, tmp_path / name, *options, name=name)
    assert git(folder, "log", "--format=%s").splitlines() == [f"Begin {name}"]
    assert git(folder, "status", "--porcelain") == ""
    texts = _texts(folder)
    assert not _matches(OURS, texts)
    assert not _matches(r"\{\{[#/\w]", texts)
    assert f"trains `model={_default('model', texts)}` on `data={_default('data', texts)}`" in texts["README.md"]
    if "--bare" in options:
        assert not _matches(EXAMPLES, texts)
    assert f"src/{name}/__init__.py" in texts
    assert f"_target_: {name}.models" in "".join(texts.values())
    for command in (["check"], ["format", "--check"]):
        checked = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=folder, capture_output=True)
        assert checked.returncode == 0, checked.stdout


def test_what_needs_a_gpu_is_skipped_where_there_is_none(clone: Path, tmp_path: Path) -> None:
    folder = made(clone, tmp_path / "birdsong")
    tests = ["tests/birdsong/examples/test_gpt.py", "-k", "test_a_gpu_skips"]
    environ = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert "it needs 1 CUDA devices, and 0 are here" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_make_fork_prints_what_its_page_shows(clone: Path, tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "fork.md").read_text()
    shown = re.search(r"^    \$ (make fork .*)\n((?:    .*\n)+)", page, re.MULTILINE)
    assert shown is not None
    told = run(shown[1].replace("../", f"{tmp_path}/").split(" "), clone)
    masked, count = r"\d+ files|commit \w+", r"(\d+) files"
    expected = re.sub("^    ", "", shown[2], flags=re.MULTILINE)
    assert re.sub(masked, "", told.replace(f"{tmp_path}/", "../")) == re.sub(masked, "", expected)
    assert int(re.findall(count, expected)[0]) == pytest.approx(int(re.findall(count, told)[0]), rel=0.05)
    documents = [path for path in (tmp_path / "birdsong").rglob("*.md") if path.name != "CHANGELOG.md"]
    links = [(page, link) for page in documents for link in re.findall(r"\]\(([^()#\s:]+)[)#]", page.read_text())]
    assert len(links) > 250
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_engine_is_the_folder_as_it_was_with_a_manifest(clone: Path, tmp_path: Path) -> None:
    folder = made(clone, tmp_path / "birdsong") / "src/lightswitch"
    manifest = json.loads((folder / "engine.json").read_text())
    assert manifest["commit"] == git(clone, "rev-parse", "HEAD").strip()
    paths = git(clone, "ls-files", "src/lightswitch").splitlines()
    assert manifest["files"].keys() == {path.removeprefix("src/lightswitch/") for path in paths}
    for path in manifest["files"]:
        assert (folder / path).read_bytes() == (clone / "src/lightswitch" / path).read_bytes(), path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *((name, "is not a valid Python package name") for name in ("Bird", "bird-song", "1bird", "class", "match")),
        *((name, "is already used in the project") for name in ("lightswitch", "tests", "train", "conf", "runs")),
        ("json", "is a module of Python's standard library"),
        *((name, "is the name of an installed package") for name in ("torch", "hydra", "sklearn", "yaml")),
        ("birdsong inside", "inside is inside the checkout"),
        ("birdsong {tmp}/full", "full is not empty"),
        ("birdsong {tmp}/full/file", "file is a file"),
        ("birdsong {tmp}/new --engine=package", "origin does not have this commit; push it, or type --engine-from="),
        ("birdsong {tmp}/new --engine=package --engine-from=newest", "newest is not a version, a wheel or a git"),
        ("birdsong {tmp}/new --engine=package --engine-from=none.whl", "found no wheel none.whl"),
        ("birdsong {tmp}/new --engine-from=0.1.0", "also type --engine=package"),
        ("birdsong {tmp}/new --engine=package --engine-from=git+file:///nowhere@main", "git ls-remote: "),
        ("birdsong {tmp}/new --engine=package --engine-from=git+file://{clone}@none", "found no none in file://"),
        ("birdsong", "the following arguments are required: INTO"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(arguments: str, told: str, clone: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    words = arguments.format(tmp=tmp_path, clone=clone).split(" ")
    if len(words) == 1 and "required" not in told:
        words.append(str(tmp_path / "new"))
    done = fork(clone, *words)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*\n", done.stderr)
    assert told in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", ["NAME=zebra_finch", "INTO=../birdsong", ""])
def test_make_refuses_to_guess_a_name_or_a_folder(words: str, clone: Path) -> None:
    told = run(["make", "fork", *words.split()], clone, code=2)
    assert told.startswith("error: name the package and a new folder, as in make fork NAME=birdsong INTO=../birdsong\n")
    assert git(clone, "branch", "--format=%(refname:short)") == "main\n"


def test_a_package_is_pinned_to_the_commit_that_a_tag_is_of(own_clone: Path, tmp_path: Path) -> None:
    commit = git(own_clone, "rev-parse", "HEAD").strip()
    git(own_clone, "tag", "--annotate", "--message=One", "v1")
    git(own_clone, "commit", "--quiet", "--allow-empty", "--message=Later")
    git(own_clone, "branch", "another/v1")
    folder = made(own_clone, tmp_path / "birdsong", "--engine=package", f"--engine-from=git+file://{own_clone}@v1")
    assert f'"lightswitch @ git+file://{own_clone}@{commit}",' in (folder / "pyproject.toml").read_text()


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
    assert made(own_clone, tmp_path / "whole", "--bare", "--engine=folder").joinpath("src/lightswitch").is_dir()
    git(own_clone, "commit", "--quiet", "--allow-empty", "--message=Of my own, not pushed")
    assert made(own_clone, tmp_path / "later", "--bare").joinpath("src/lightswitch").is_dir()


def test_a_checkout_with_changes_is_refused_and_its_branch_can_be_the_project(own_clone: Path) -> None:
    (own_clone / "train.py").write_text("changed")
    refused = fork(own_clone, "birdsong", ".", "--bare")
    assert refused.stderr == "error: found changes that are not committed: train.py; commit or stash them\n"
    git(own_clone, "checkout", "--", "train.py")

    (own_clone / "runs").mkdir()
    (own_clone / "runs/mine").touch()
    done = fork(own_clone, "birdsong", ".", "--bare")
    assert done.returncode == 0, done.stderr
    assert git(own_clone, "branch", "--show-current") == "birdsong\n"
    assert git(own_clone, "log", "--format=%s") == "Begin birdsong\n"
    assert git(own_clone, "status", "--porcelain") == ""
    assert (own_clone / "runs/mine").exists()
    for gone in ("src/project", "tests/engine", "benchmarks", "template"):
        assert not (own_clone / gone).exists(), gone
    assert "Begin" not in git(own_clone, "log", "--format=%s", "main")
    again = fork(own_clone, "owls", ".")
    assert "found no checkout of lightswitch" in again.stderr


@pytest.mark.parametrize("mark", ["skip-worktree", "assume-unchanged", "showUntrackedFiles"])
def test_what_git_was_told_not_to_look_at_is_refused_before_anything_is_written(mark: str, own_clone: Path) -> None:
    if mark == "showUntrackedFiles":
        git(own_clone, "config", "status.showUntrackedFiles", "no")
        (own_clone / "mine.txt").write_text("mine")
    else:
        git(own_clone, "update-index", f"--{mark}", "train.py")
        (own_clone / "train.py").write_text("mine")
    refused = fork(own_clone, "birdsong", ".", "--bare")
    assert refused.returncode == 2
    assert ("mine.txt" if mark == "showUntrackedFiles" else "train.py") in refused.stderr
    assert (git(own_clone, "branch", "--format=%(refname:short)"), git(own_clone, "status", "-s")) == ("main\n", "")


def test_an_ignored_file_in_the_way_of_a_fork_stays(own_clone: Path) -> None:
    (own_clone / ".git/info/exclude").write_text("src/birdsong/\n")
    (mine := own_clone / "src/birdsong/__init__.py").parent.mkdir()
    mine.write_text("mine")
    refused = fork(own_clone, "birdsong", ".", "--bare")
    assert (refused.returncode, mine.read_text()) == (2, "mine")
    assert refused.stderr.endswith("src/birdsong/__init__.py; move it elsewhere\n")
    assert (git(own_clone, "branch", "--format=%(refname:short)"), git(own_clone, "status", "-s")) == ("main\n", "")


def test_commits_that_no_branch_has_are_not_left_behind(own_clone: Path) -> None:
    git(own_clone, "checkout", "--quiet", "--detach")
    git(own_clone, "commit", "--quiet", "--allow-empty", "--message=Mine")
    refused = fork(own_clone, "birdsong", ".", "--bare")
    told = "error: found commits that are on no branch; create a branch for them first: git branch NAME\n"
    assert (refused.returncode, refused.stderr) == (2, told)
    assert git(own_clone, "log", "-1", "--format=%s") == "Mine\n"


def test_a_fork_trains_and_outside_of_its_environment_says_what_to_type(clone: Path, tmp_path: Path) -> None:
    folder = made(clone, tmp_path / "birdsong", "--bare")
    told = run([sys.executable, "-S", "train.py"], folder, code=1)
    activate = "type source .venv/bin/activate, or make train, which sets it up"
    assert told == f"error: No module named 'lightswitch'; {activate}\n"
    assert run(["git", "check-ignore", "exports/a.pt", "data/a", "runs/a"], folder).count("\n") == 3
    assert "test/accuracy" in run(["env", f"PYTHONPATH={folder}/src", "python", "train.py", "debug=limit"], folder)


def test_an_editor_debugs_one_process_and_two(train: Train) -> None:
    settings = json.loads((CHECKOUT / ".vscode/launch.json").read_text())
    one, two = ([*configuration["args"], "trainer.max_steps=2"] for configuration in settings["configurations"])
    train(*one)
    two.remove("trainer.devices=2")
    train(*two, ranks=2)
