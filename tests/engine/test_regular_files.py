"""Files that may come from anywhere: what is no regular one, or is too much, is refused at once."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightswitch import regular_files
from lightswitch.errors import IrregularFile, printable

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
