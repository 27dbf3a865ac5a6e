"""Files that may come from anywhere: no pipe, no bomb; and one function removes directories, only those made here."""

from __future__ import annotations

import json
import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightswitch import regular_files
from lightswitch.errors import IrregularFile, Refused, printable
from lightswitch.regular_files import make_tree, remove_tree

BOMB = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 8)}]\n" for n in range(20)
)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "directory"])
def test_what_is_no_regular_file_is_not_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("place")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
    else:
        place.mkdir()
    for read in (regular_files.read_text, regular_files.read_json, regular_files.read_yaml):
        with pytest.raises(IrregularFile, match=f"is a {kind}, expected a regular file; "):
            read(place)


@pytest.mark.parametrize(
    "text", ["5", BOMB, "a: " + "[" * 500 + "]" * 500, "a: '" + "${" * 5000 + "'", "a: " + "9" * 5000]
)
def test_a_bomb_of_yaml_is_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^x\.yaml[ :][^\n]*$"):
        regular_files.read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", ["[" * 100 + "]" * 100, "[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "\udcff"])
def test_so_is_one_of_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        regular_files.read_json(tmp_path / "x.json")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="is larger than 32768 KiB"):
        regular_files.read_json(tmp_path / "x.json")


@dataclass(frozen=True)
class Job:
    number: int
    words: list[str]
    seconds: dict[str, float]
    error: str | None = None


GOOD = {"number": 3, "words": ["a"], "seconds": {"data": 1}}
ODD: tuple[Any, ...] = (
    *([], None, {}, {"number": 3}, {**GOOD, "more": 1}, {**GOOD, "number": "3"}, {**GOOD, "number": True}),
    *({**GOOD, "number": 1 << 70}, {**GOOD, "words": "ab"}, {**GOOD, "words": [{}]}, {**GOOD, "seconds": [1]}),
    *({**GOOD, "seconds": {"data": None}}, {**GOOD, "error": 5}),
)


@pytest.mark.parametrize("found", ODD, ids=json.dumps)
def test_fields_of_another_type_make_no_record(found: Any) -> None:
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
