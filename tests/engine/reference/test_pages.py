"""The pages that are made are as conf, the code and the results of benchmarks are now."""

from __future__ import annotations

import re
import sys

import pytest

from tests.engine.config import test_hydra_errors as mistakes
from tests.engine.launch.test_habits import RUNS
from tests.engine.tables.page import MADE
from tests.engine.tables.reference import ENGINE, FOLDER, SCRIPTS, pages

NAMES = ("choices", "commands", "messages", "run-directory", "environment", "measurements")
PAGES = tuple(f"reference/{name}.md" for name in NAMES)


@pytest.fixture(scope="module")
def now() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_no_older_than_the_code(name: str, now: dict[str, str]) -> None:
    if name == "reference/commands.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse of another Python sets options otherwise")
    assert (FOLDER / name).read_text() == now[name], "type python -m tests.engine.tables.reference"


def test_nothing_else_is_made(now: dict[str, str]) -> None:
    assert (
        now.keys()
        == set(PAGES)
        == {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.md") if MADE in path.read_text()}
    )


def test_messages_are_found_by_what_a_user_pastes(now: dict[str, str]) -> None:
    page = now["reference/messages.md"]
    assert "does not divide over" in page
    assert "the training set has no samples" in page
    assert "failed with exit code {code}, time {count} of at most {max_failures}: requeued" in page
    assert page.count("\n- `") > 200


MISTAKES = {told for told in mistakes.MISTAKES.values() if isinstance(told, str)}
HABITS = [habit.get("told", "") for row in RUNS.values() for habit in row.get("habits", {}).values()]
MISTAKES |= {told[len("error: ") : -1] for told in HABITS if re.fullmatch(r"error: .*\n", told)}


def test_each_mistake_that_is_typed_in_a_test_is_on_the_page(now: dict[str, str]) -> None:
    """By more than what is filled in, so that a search for the line finds it."""
    told = [
        re.split(r"\{[^{}]*\}", line) for line in re.findall("^- `(.*)`$", now["reference/messages.md"], re.MULTILINE)
    ]
    patterns = [re.compile(".*".join(map(re.escape, parts))) for parts in told if sum(map(len, parts)) >= 8]
    missing = {line for line in MISTAKES if not any(pattern.search(line) for pattern in patterns)}
    assert missing == set()


def test_the_lines_by_which_a_job_was_requeued_are_those_that_are_printed() -> None:
    _, _, section = (FOLDER / "clusters.md").read_text().partition("## Why a job was requeued\n")
    told = re.findall(
        r"`([a-z]+ .*?)`", "\n".join(re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE))
    )
    assert len(told) == 11
    code = "".join(path.read_text() for folder in (ENGINE, SCRIPTS) for path in folder.rglob("*.[ps][yh]"))
    filled = re.sub(r"%s|\$\w+|\$\{[^}]+\}", "N", code)
    for line in told:
        assert re.sub(r"\b(ID|HOST|SIG\w+|3|143)\b", "N", line) in filled, line
