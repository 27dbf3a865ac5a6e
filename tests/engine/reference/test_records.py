"""What docs/reference says of a run's directory and of the environment is what a run leaves, and what is read."""

from __future__ import annotations

import csv
import json
import re

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, runs_in
from tests.engine.tables import environment
from tests.engine.tables.run_directory import COLUMNS, FILES, FILES_OF_SOME, RECORDS

ENGINE = CHECKOUT / "src" / "lightswitch"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    short = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1")
    switches = ("strategy=single", "callbacks=[default,grad_norm,step_times]")
    return runs_in(tmp_path_factory.mktemp("run"))(*PLAIN, *short, *switches)


def _pattern(name: str) -> str:
    """Return one of what a page says, where `<n>` stands for any text without a slash."""
    return re.sub(r"<\w+>", "[^/]+", re.escape(name))


def test_a_run_leaves_the_files_of_the_page_and_no_other(run: Finished) -> None:
    left = [f"{path.relative_to(run.run_dir)}{'/' * path.is_dir()}" for path in run.run_dir.rglob("*")]
    left.remove("checkpoints/")
    assert not [name for name in FILES if not any(re.match(_pattern(name), path) for path in left)]
    told = [_pattern(name) for name in (*FILES, *FILES_OF_SOME)]
    assert not [path for path in left if not any(re.match(name, path) for name in told)]


@pytest.mark.parametrize("name", [name for name in FILES_OF_SOME if name.endswith((".json", ".svg", ".html"))])
def test_the_code_names_the_files_that_some_runs_have(name: str) -> None:
    assert any(f'"{name}"' in path.read_text() for path in ENGINE.rglob("*.py"))


def test_metrics_csv_has_the_columns_of_the_page(run: Finished) -> None:
    with (run.run_dir / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    known = [_pattern(name) for name in COLUMNS if name != "<name>"]
    own = [column for column in columns if not any(re.fullmatch(name, column) for name in known)]
    assert own == ["val/accuracy", "val/loss", "test/accuracy", "test/loss"]  # what the module logs
    missing = [name for name in known if not any(re.fullmatch(name, column) for column in columns)]
    assert missing == ["world", "throughput/tokens_per_second"]  # it has not changed; samples are no sequences


@pytest.mark.parametrize(("file", "record"), [pair for pair in RECORDS if pair[0] != "job.json"])
def test_a_file_of_json_has_the_fields_of_the_page(file: str, record: type, run: Finished) -> None:
    assert [*json.loads((run.run_dir / file).read_text())] == [*record.__dataclass_fields__]


def test_results_json_has_the_last_value_of_each_metric(run: Finished) -> None:
    results = json.loads((run.run_dir / "results.json").read_text())
    for name, value in results.items():
        assert value == pytest.approx([*run.column(name).values()][-1]), name


def test_every_variable_that_is_read_is_told() -> None:
    assert environment.readers().keys() == {*environment.YOURS, *environment.OF_LAUNCHERS, *environment.SET}
