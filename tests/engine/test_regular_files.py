"""Files that are complete or the previous ones, and one function that removes directories, only those made here."""

from __future__ import annotations

import errno
import json
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightswitch import regular_files
from lightswitch.errors import Refused, printable
from lightswitch.regular_files import make_tree, remove_tree


@pytest.mark.parametrize("text", ["5", "a: [", "a: ${", "\udcff"])
def test_what_is_no_yaml_is_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"^x\.yaml[ :][^\n]*$"):
        regular_files.read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", ["[", "9" * 5000, "", "\udcff"])
def test_so_is_what_is_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"^x\.json: [^\n]*$"):
        regular_files.read_json(tmp_path / "x.json")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_link_is_replaced_at_once_and_followed_also_without_symbolic_links(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(path: Path, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", no_links)
    for target in ("one", "two"):
        (tmp_path / target).mkdir()
        regular_files.write_link(tmp_path / "last", target)
        assert regular_files.is_link(tmp_path / "last")
        assert regular_files.linked(tmp_path / "last").resolve() == tmp_path / target
    assert sorted(os.listdir(tmp_path)) == ["last", "one", "two"]
    assert (tmp_path / "last").is_symlink() == has_links
    assert not regular_files.is_link(tmp_path / "one")


@dataclass(frozen=True)
class Job:
    number: int
    words: list[str]
    seconds: dict[str, float]
    error: str | None = None


GOOD = {"number": 3, "words": ["a"], "seconds": {"data": 1}}
ODD: tuple[Any, ...] = ([], None, 5, {}, {"number": 3}, {**GOOD, "more": 1})


@pytest.mark.parametrize("found", ODD, ids=json.dumps)
def test_other_fields_make_no_record(found: Any) -> None:
    assert regular_files.as_record(GOOD, Job) == Job(3, ["a"], {"data": 1})
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        regular_files.as_record(found, Job)


def test_a_terminal_gets_letters_alone() -> None:
    assert printable("\x1b[31mred\x07\r\u202etxt\nnext\ttab é ☃\udcff") == "�[31mred���txt\nnext\ttab é ☃�"


def test_what_was_made_is_removed_whole_and_what_is_there_already_is_not_made_ours(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "parent" / "tree")
    (tree / "below").mkdir()
    (tree / "below" / "file").touch()
    remove_tree(tree)
    assert os.listdir(tmp_path / "parent") == []
    with pytest.raises(FileExistsError):
        make_tree(tmp_path)
    assert os.listdir(tmp_path) == ["parent"]


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


def test_what_holds_no_mark_stays_and_so_does_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").touch()
    (tmp_path / "link").symlink_to(make_tree(tmp_path / "tree"))
    for name, why in {"photos": r"photos was not removed: it has no \.lightswitch", "link": "it is a link"}.items():
        with pytest.raises(Refused, match=why):
            remove_tree(tmp_path / name)
    assert (tmp_path / "photos/cat.png").exists()
    assert (tmp_path / "tree").exists()


def test_what_was_removed_in_part_can_be_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree")
    make_tree(tree / "below")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda path: os.rmdir(path))  # which fails, as a disk would
        with pytest.raises(OSError, match="not empty"):
            remove_tree(tree)
    remove_tree(tree)
    assert not tree.exists()


def test_a_tree_is_removed_for_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # no entry: KeyError
    remove_tree(make_tree(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
