"""Docstrings read for what each argument is: sections `Args:` as Google's style has them, and torch's."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

_SECTION = re.compile(r"^( *)(?:Args|Arguments|Parameters):[ \t]*\n(.*?)(?=^\1\S|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^\*{0,2}(\w+(?:, \w+)*)(?: *\([^\n]*?\))? ?: *(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_LONGEST = 400  # characters of a sentence


def arguments(docstrings: Iterable[str]) -> dict[str, str]:
    """Return the first sentence on each argument, by its name; of several docstrings, the first that has it."""
    found: dict[str, str] = {}
    for docstring in docstrings:
        for name, told in _entries(docstring):
            found.setdefault(name, told)
    return found


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    for _, section in _SECTION.findall(textwrap.dedent(docstring)):
        for names, told in _ENTRY.findall(textwrap.dedent(section)):
            if sentence := _sentence(told):
                yield from ((name, sentence) for name in names.split(", "))


def _sentence(told: str) -> str:
    """Return the first sentence of a paragraph without its markup, nor the default, which the signature has."""
    text = " ".join(told.split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"\1", text)
    text = re.sub(r"`([^`<]+?) *(?:<[^>]*>)?`_*", r"\1", text.replace("``", "`"))
    text = re.sub(r" *\((?:[Dd]efault|optional)[^)]*\)+| *[Dd]efaults?(?: to|:|=) .*$", "", text)
    first = re.split(r"(?<=[^.][a-z)\]'\"0-9])\.(?: |$)", text, maxsplit=1)[0].strip(" .,")
    return first if len(first) <= _LONGEST else ""
