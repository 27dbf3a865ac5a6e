"""docs/bring-your-own.md: what its right columns say to type is taken, and what it says of callbacks is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from lightswitch.config.overrides import key_and_value
from lightswitch.strategies.callbacks import NOWHERE, OF_ONE_PROCESS, OF_WHOLE_PARAMETERS
from tests.engine.config.mistaken import answers
from tests.engine.conftest import CHECKOUT

PAGE = (CHECKOUT / "docs/bring-your-own.md").read_text()
CODE = re.compile(r"`([^`]+)`")


def _rows(heading: str) -> Iterator[tuple[str, str]]:
    """The two cells of each row of a section's table."""
    (section,) = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]:
        there, here = line.split(" | ")
        if not there.startswith("---"):
            yield there, here


SECTIONS = [name for name in re.findall(r"^##+ (I .*)$", PAGE, re.MULTILINE)]


def _commands(sections: list[str]) -> list[list[str]]:
    """What the tables say to type, in as few commands as have no key twice; an experiment by itself."""
    commands: list[dict[str, str]] = []
    for section in sections:
        for _, here in _rows(section):
            words = [word for code in CODE.findall(here) for word in code.split() if "=" in word or word[0] == "~"]
            typed = {key_and_value(word)[0]: word for word in words}
            found = next((one for one in commands if not one.keys() & {*typed, "experiment"}), None)
            found = None if "experiment" in typed else found
            if found is None:
                commands.append(found := {})
            found |= typed
    return [list(command.values()) for command in commands]


def test_what_the_tables_say_to_type_is_taken(tmp_path: Path) -> None:
    """A command is refused for the one mistake that is put into it, and for nothing else."""
    named = {str(number): [*words, "meet_timeout_seconds=x"] for number, words in enumerate(_commands(SECTIONS))}
    found = answers(named, tmp_path)
    for number, words in named.items():
        told = "error: meet_timeout_seconds=x: found str, expected float or int\n"
        assert (found[number].returncode, found[number].err) == (2, told), words


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_has_a_table(section: str) -> None:
    assert len(list(_rows(section))) >= 8


def test_the_table_of_callbacks_is_what_the_code_does() -> None:
    told = {CODE.findall(name)[0]: here for name, here in _rows("Lightning's callbacks")}
    assert sorted(told) == sorted(callbacks.__all__)
    assert {name for name, here in told.items() if here.startswith("refused")} == set(NOWHERE)
    assert {name for name, here in told.items() if "sharded strategies refuse it" in here} == {
        *(OF_WHOLE_PARAMETERS.keys() - {"BaseFinetuning"}),
        "BackboneFinetuning",
    }
    assert {name for name, here in told.items() if "refused on several devices" in here} == set(OF_ONE_PROCESS)
