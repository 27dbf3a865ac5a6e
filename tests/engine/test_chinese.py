"""The Chinese page types what the English ones do: the same commands, the same files, the same choices."""

from __future__ import annotations

import re

import pytest

from tests.engine.conftest import CHECKOUT

DOCS = CHECKOUT / "docs"
QUICK_START, _, STRATEGIES = (DOCS / "zh" / "guide.md").read_text().partition("\n## 策略\n")
PARTS = {"quick-start": QUICK_START, "strategies": STRATEGIES}
TUTORIAL, ENGLISH = ((DOCS / name).read_text() for name in ("tutorial.md", "strategies.md"))
TYPED = (CHECKOUT / "README.md", *(path for path in DOCS.rglob("*.md") if path.parent.name != "zh"))
FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
MADE = re.compile(r"<!-- ([\w ]+) -->\n.*?<!-- end of \1 -->", re.DOTALL)


def _lines_of_code(text: str) -> list[str]:
    return re.findall(r"^    +(\S.*)$", FENCED.sub("", text), re.MULTILINE)


def _code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", FENCED.sub("", text)))


def test_commands_are_found_in_the_page() -> None:
    assert len(_lines_of_code(QUICK_START)) >= 15
    assert len(_code(STRATEGIES)) >= 60


@pytest.mark.parametrize("part", PARTS)
def test_a_command_is_one_that_an_english_page_types(part: str) -> None:
    english = {line for path in TYPED for line in _lines_of_code(path.read_text())}
    assert [line for line in _lines_of_code(PARTS[part]) if line not in english] == []


def test_the_files_to_write_are_those_of_the_tutorial() -> None:
    files = FENCED.findall(QUICK_START)
    assert len(files) == 4
    assert [file for file in files if file not in TUTORIAL] == []


def test_the_part_on_strategies_names_what_the_english_page_names() -> None:
    assert _code(MADE.sub("", ENGLISH)) <= _code(STRATEGIES)
    assert [name for name in _code(STRATEGIES) if name not in ENGLISH] == []


def test_the_table_of_strategies_has_the_same_rows() -> None:
    tables = ENGLISH.partition("\n## ")[0], STRATEGIES.partition("\n### ")[0]
    rows = [re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for text in tables]
    english, chinese = ([re.findall(r"`([^`]+)`", row) for row in found] for found in rows)
    assert chinese == english


@pytest.mark.parametrize("part", PARTS)
def test_it_is_chinese_with_chinese_punctuation(part: str) -> None:
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", FENCED.sub("", PARTS[part]))
    assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > 400
    assert re.findall(r"[\u4e00-\u9fff][,;:?!]|[\u4e00-\u9fff]\. ", prose) == []
