"""One function removes directories, and only those that this project has made."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

import pytest

from lightswitch.errors import Refused
from lightswitch.regular_files import make_tree, remove_tree
from tests.engine.conftest import CHECKOUT


def test_what_was_made_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "parent" / "tree")
    (tree / "below").mkdir()
    (tree / "below" / "file").touch()
    remove_tree(tree)
    assert os.listdir(tmp_path / "parent") == []


def test_what_is_there_already_is_not_made_ours(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        make_tree(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [".", "..", "", "/", "~"])
def test_the_working_directory_the_home_and_their_parents_stay(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work = (make_tree(tmp_path / name) for name in ("home", "work"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(make_tree(work / "below"))
    with pytest.raises(Refused, match="directory, or contains it"):
        remove_tree(Path(path).expanduser())
    assert home.exists()
    assert work.exists()


def test_what_holds_no_mark_stays(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").touch()
    with pytest.raises(Refused, match=r"photos was not removed: it has no \.lightswitch"):
        remove_tree(tmp_path / "photos")
    assert (tmp_path / "photos").exists()


def test_a_link_to_what_was_made_stays_and_so_does_what_it_leads_to(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tmp_path / "link").symlink_to(tree)
    with pytest.raises(Refused, match="it is a link"):
        remove_tree(tmp_path / "link")
    assert tree.exists()


def test_what_was_removed_in_part_can_be_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree")
    make_tree(tree / "below")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda path: os.rmdir(path))  # which fails, as a disk would
        with pytest.raises(OSError, match="not empty"):
            remove_tree(tree)
    remove_tree(tree)
    assert not tree.exists()


def test_nothing_else_removes_directories() -> None:
    """Neither in the engine nor in the tests; Python removes the temporary directories that it has made."""
    sources = [path for folder in ("src", "tests", "slurm", "benchmarks") for path in (CHECKOUT / folder).rglob("*")]
    found = [
        path for path in sources
        if path.suffix in (".py", ".sh") and re.search(r"rmtree\(|removedirs\(|\brm -\w*r", path.read_text())
    ]  # fmt: skip
    assert {path.name for path in found} == {"regular_files.py"}


def test_a_tree_is_removed_for_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # no entry: KeyError
    remove_tree(make_tree(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
