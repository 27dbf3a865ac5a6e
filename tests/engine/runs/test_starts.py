"""The list of a run's starts, and what is told of a change between two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightswitch.runs import starts
from lightswitch.runs.starts import Start

FOUR = Start(0, ["a", "b", "c", "d"], 2)


@pytest.mark.parametrize(
    ("start", "line"),
    [
        (Start(139, ["a", "b", "c"], 2), "4 nodes × 2 → 3 nodes × 2 at step 139: lost d"),
        (Start(7, ["b", "c", "d", "e"], 2), "4 nodes × 2 → 4 nodes × 2 at step 7: lost a, joined by e"),
        (Start(7, ["a", "b", "c", "d"], 1), "4 nodes × 2 → 4 nodes × 1 at step 7"),
        (Start(7, ["d", "c", "b", "a"], 2), ""),
    ],
)
def test_a_change_names_what_was_lost_and_what_has_joined(start: Start, line: str) -> None:
    assert start.change_from(FOUR) == line


def test_one_machine_in_place_of_another_is_no_change() -> None:
    assert Start(7, ["b"], 1).change_from(Start(0, ["a"], 1)) == ""


def test_steps_that_a_failed_start_had_trained_since_its_checkpoint_are_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n0,1.0\n9,0.5\n")  # as far as it was logged
    assert starts.of_next(tmp_path, 8, ["a"], 1).trained_twice == 2
    for rank_reached in (13, 14, 13):
        starts.note_reached(tmp_path, rank_reached)
    assert starts.of_next(tmp_path, 8, ["a"], 1).trained_twice == 6
    starts.forget_reached(tmp_path)
    assert starts.of_next(tmp_path, 20, ["a"], 1).trained_twice == 0


def test_changes_and_steps_are_counted_over_all_starts(tmp_path: Path) -> None:
    of_run = [FOUR, Start(5, ["a", "b"], 2, trained_twice=3), Start(9, ["a", "b"], 2, trained_twice=1)]
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts.as_json(of_run)}))
    assert starts.read(tmp_path) == of_run
    assert starts.changes(of_run) == starts.Changes([5], 4)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"starts": 1}', '{"starts": [{"step": "x"}]}'])
def test_a_damaged_record_has_no_starts(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert starts.read(tmp_path) == []
