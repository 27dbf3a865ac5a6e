"""The pages that are made are as conf, the code, a run and the results of benchmarks are now."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.engine.config import test_hydra_errors as mistakes
from tests.engine.conftest import CHECKOUT, PLAIN, Train
from tests.engine.launch.test_habits import RUNS
from tests.engine.tables import environment
from tests.engine.tables.claims import HELD, MEASURED
from tests.engine.tables.page import MADE
from tests.engine.tables.reference import FOLDER, pages
from tests.engine.tables.run_directory import COLUMNS, FILES, FILES_OF_SOME, RECORDS

TIME_OR_SPEED = re.compile(r"\d[\d.,]* (?:µs|ms|MB)\b|\w+ of (?:a second of )?CPU\b|\w+ times faster")


@pytest.fixture(scope="module")
def now() -> dict[str, str]:
    return pages()


def test_no_page_is_older_than_the_code(now: dict[str, str]) -> None:
    assert now.keys() == {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.md") if MADE in path.read_text()}
    for name, text in now.items():
        if name != "reference/commands.md" or sys.version_info[:2] == (3, 11):  # argparse of others sets options anew
            assert (FOLDER / name).read_text() == text, "type python -m tests.engine.tables.reference"


def test_each_mistake_that_is_typed_in_a_test_is_on_the_page(now: dict[str, str]) -> None:
    """By more than what is filled in, so that a search for the line finds it."""
    typed = {told for told in mistakes.MISTAKES.values() if isinstance(told, str)}
    habits = [habit.get("told", "") for row in RUNS.values() for habit in row.get("habits", {}).values()]
    typed |= {told[len("error: ") : -1] for told in habits if re.fullmatch(r"error: .*\n", told)}
    lines = re.findall("^- `(.*)`$", now["reference/messages.md"], re.MULTILINE)
    told = [re.split(r"\{[^{}]*\}", line) for line in lines]
    patterns = [re.compile(".*".join(map(re.escape, parts))) for parts in told if sum(map(len, parts)) >= 8]
    assert [line for line in typed if not any(pattern.search(line) for pattern in patterns)] == []


def test_a_run_leaves_the_files_and_fields_of_the_page_and_no_other(train: Train) -> None:
    short = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", "strategy=single")
    run = train(*PLAIN, *short, "callbacks=[default,grad_norm,step_times]").run_dir
    left = [f"{path.relative_to(run)}{'/' * path.is_dir()}" for path in run.rglob("*") if path.name != "checkpoints"]
    assert not [name for name in FILES if not any(re.match(_pattern(name), path) for path in left)]
    told = [_pattern(name) for name in (*FILES, *FILES_OF_SOME)]
    assert not [path for path in left if not any(re.match(name, path) for name in told)]
    with (run / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    known = [_pattern(name) for name in COLUMNS if name != "<name>"]
    own = [column for column in columns if not any(re.fullmatch(name, column) for name in known)]
    assert own == ["val/accuracy", "val/loss", "test/accuracy", "test/loss"]  # what the module logs
    missing = [name for name in known if not any(re.fullmatch(name, column) for column in columns)]
    assert missing == ["world", "throughput/tokens_per_second"]  # it has not changed; samples are no sequences
    for name, record in RECORDS:
        if name != "job.json":
            assert [*json.loads((run / name).read_text())] == [*record.__dataclass_fields__], name


def _pattern(name: str) -> str:
    """Return one of what a page says, where `<n>` stands for any text without a slash."""
    return re.sub(r"<\w+>", "[^/]+", re.escape(name))


def test_every_variable_that_is_read_is_told() -> None:
    assert environment.readers().keys() == {*environment.YOURS, *environment.OF_LAUNCHERS, *environment.SET}


def test_each_time_or_speed_of_a_document_is_on_the_page_with_a_command_that_measures_it() -> None:
    for path in {*(CHECKOUT / "docs").glob("*.md"), CHECKOUT / "README.md"}:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        prose = " ".join(re.sub(r"^    .*$|^ *\|.*$", "", prose, flags=re.MULTILINE).split())
        told = " ".join(claim.words for claim in (*HELD, *MEASURED) if CHECKOUT / claim.document == path)
        assert [found for found in TIME_OR_SPEED.findall(prose) if found not in told] == [], path
    for claim in MEASURED:
        match shlex.split(claim.shown_by):
            case ["make", target]:
                assert re.search(rf"^{target}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE), claim
            case ["torchrun", *_, "-m", module] | ["python", "-m", module, *_]:
                path = CHECKOUT / Path("src" if module.startswith("lightswitch") else "", *module.split("."))
                assert path.is_dir() or path.with_suffix(".py").is_file(), claim
            case kept:
                assert kept == [] or kept[:2] in (["python", "train.py"], ["python", "-c"]), claim
    for claim in HELD:
        assert "def test_" in (CHECKOUT / claim.shown_by).read_text(), claim
