"""The starts of a run: what changes between two, and where a command begins that its launcher starts again."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from lightswitch.runs import claim, starts
from lightswitch.runs.starts import Start
from tests.engine.conftest import PLAIN, Finished, Train, once
from tests.night import at_night

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
    assert Start(7, ["b"], 1).change_from(Start(0, ["a"], 1)) == ""  # one machine in place of another


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


def test_a_damaged_record_has_no_starts(tmp_path: Path) -> None:
    for text in ("", "{}", "[]", '{"starts": 1}', '{"starts": [{"step": "x"}]}'):
        (tmp_path / "run.json").write_text(text)
        assert starts.read(tmp_path) == []


# A command that says where to begin, started again by its launcher; and a run that goes back to an earlier step

RUN = (*PLAIN, "name=plain", "run_id=mine", "trainer.accelerator=cpu", "trainer.val_check_interval=2")
RUN += ("callbacks.last_checkpoint.every_n_steps=2", "callbacks.last_checkpoint.keep=9")
SLURM = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "17"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "night"}
SEVERAL = TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SEVERAL |= {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "job", "is_restart"),
    [
        (SLURM | TORCHRUN, "Slurm job 17", True),  # on nodes that are left, Slurm doesn't count it
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun night", True),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"}, "torchrun night", False),  # typed again
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_JOB_ID": "17"}, "torchrun night", False),  # in a shell
        (SEVERAL, "torchrun at a:29500", False),
        ({}, None, False),
    ],
)
def test_a_restart_by_a_job_is_told_from_a_command_that_is_typed(
    environ: dict[str, str], job: str | None, is_restart: bool
) -> None:
    assert claim.job(environ) == job
    assert claim.restarted_job(environ) == (job if is_restart else None)


@pytest.mark.parametrize(("begun", "is_restart"), [("Slurm job 17", True), ("Slurm job 16", False), ("", False)])
def test_what_a_job_has_saved_is_of_its_own_last_start(begun: str, is_restart: bool, tmp_path: Path) -> None:
    of_run = [asdict(Start(0, ["a"], 1, job="Slurm job 9")), asdict(Start(0, ["a"], 1, job=begun))]
    (tmp_path / "run.json").write_text(json.dumps({"starts": of_run}))
    assert not starts.has_saved(tmp_path, "Slurm job 17")
    (tmp_path / "checkpoints" / "step_2.ckpt").mkdir(parents=True)
    assert starts.has_saved(tmp_path, "Slurm job 17") == is_restart


earlier = once(*RUN, "trainer.max_steps=6")


@pytest.fixture
def copied(earlier: Finished, tmp_path: Path) -> Path:
    """The folder of a copy of the run."""
    return Path(shutil.copytree(earlier.folder, tmp_path / "copied", symlinks=True))


@pytest.mark.parametrize("how", ["resume=never", *at_night("resume=runs/plain/mine/checkpoints/step_2.ckpt")])
def test_where_a_job_begins_is_for_its_first_start(how: str, copied: Path, train: Train) -> None:
    first = train(*RUN, how, "trainer.max_steps=4", folder=copied, environment=SLURM)
    assert "restart " not in first.out
    again = train(*RUN, how, "trainer.max_steps=5", folder=copied, environment=SLURM)
    assert f"restart    of Slurm job 17, which has begun with {how}: it resumes what it has saved since" in again.out
    assert re.search(r"resumes    runs/plain/mine/checkpoints/\S+, at step 4\b", again.out)
    typed = train(*RUN, "resume=never", "trainer.max_steps=1", folder=copied)
    assert "resumes " not in typed.out


def test_what_a_run_had_trained_after_the_step_that_it_goes_back_to_is_not_resumed(copied: Path, train: Train) -> None:
    back = "resume=runs/plain/mine/checkpoints/step_2.ckpt"
    gone_back = train(*RUN, back, "trainer.max_steps=3", folder=copied)
    run_dir = gone_back.run_dir
    assert "aside      runs/plain/mine/checkpoints_1: what was saved after step 2" in gone_back.out
    assert {"step_4.ckpt", "step_6.ckpt"} <= {path.name for path in (run_dir / "checkpoints_1").iterdir()}
    resumed = train(*RUN, "trainer.max_steps=4", folder=copied)
    assert "resumes    runs/plain/mine/checkpoints/step_3.ckpt, at step 3" in resumed.out


def test_what_a_run_had_saved_is_not_resumed_after_it_has_begun_with_another_ones(copied: Path, train: Train) -> None:
    other = copied / "other.ckpt"
    shutil.copytree(copied / "runs/plain/mine/checkpoints/step_2.ckpt", other)
    begun = train(*RUN, f"resume={other}", "trainer.max_steps=3", folder=copied)
    assert "aside      runs/plain/mine/checkpoints_1: what was saved before" in begun.out
    assert sorted(path.name for path in (begun.run_dir / "checkpoints").glob("step_*")) == ["step_3.ckpt"]
