"""The starts of a run: what changes between two, and where a command begins that its launcher starts again."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightswitch.process import Process
from lightswitch.runs import claim, resume
from lightswitch.runs.resume import Start
from tests.engine.conftest import PLAIN, Finished, Train, once

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


def test_steps_that_were_logged_since_a_checkpoint_are_counted(tmp_path: Path) -> None:
    assert resume.logged_steps(tmp_path) == 0
    (tmp_path / "metrics.csv").write_text("step,train/loss,test/loss\n0,1.0,\n9,0.5,\n10,,0.7\n")
    assert resume.logged_steps(tmp_path) == 10


def test_a_record_has_all_starts(tmp_path: Path) -> None:
    of_run = [FOUR, Start(5, ["a", "b"], 2, trained_twice=3), Start(9, ["a", "b"], 2, trained_twice=1)]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [*map(asdict, of_run)]}))
    assert resume.starts(tmp_path) == of_run


def test_a_damaged_record_has_no_starts(tmp_path: Path) -> None:
    for text in ("", "{}", "[]", '{"starts": 1}', '{"starts": [{"step": "x"}]}'):
        (tmp_path / "run.json").write_text(text)
        assert resume.starts(tmp_path) == []


# A command that says where to begin, started again by its launcher; and a checkpoint that is not the run's newest

RUN = (*PLAIN, "name=plain", "run_id=mine", "trainer.accelerator=cpu", "trainer.val_check_interval=2")
RUN += ("callbacks.last_checkpoint.every_n_steps=2", "callbacks.last_checkpoint.keep=9")
SLURM = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "17"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "night"}


@pytest.mark.parametrize(
    ("environ", "job", "is_restart"),
    [
        (SLURM | TORCHRUN, "Slurm job 17", True),  # on nodes that are left, Slurm doesn't count it
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun night", True),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"}, "torchrun night", False),  # typed again
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_JOB_ID": "17"}, "torchrun night", False),  # in a shell
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
    assert not resume.has_saved(tmp_path, "Slurm job 17")
    (tmp_path / "checkpoints" / "step_2.ckpt").mkdir(parents=True)
    assert resume.has_saved(tmp_path, "Slurm job 17") == is_restart


earlier = once(*RUN, "trainer.max_steps=6")


@pytest.fixture
def copied(earlier: Finished, tmp_path: Path) -> Path:
    """The folder of a copy of the run."""
    return Path(shutil.copytree(earlier.folder, tmp_path / "copied", symlinks=True))


def test_where_a_job_begins_is_for_its_first_start(copied: Path, train: Train) -> None:
    how = "resume=never"
    first = train(*RUN, how, "trainer.max_steps=4", folder=copied, environment=SLURM)
    assert "restart " not in first.out
    again = train(*RUN, how, "trainer.max_steps=5", folder=copied, environment=SLURM)
    assert f"restart    of Slurm job 17, which has begun with {how}: it resumes what it has saved since" in again.out
    assert re.search(r"resumes    runs/plain/mine/checkpoints/\S+, at step 4\b", again.out)
    typed = train(*RUN, "resume=never", "trainer.max_steps=1", folder=copied)
    assert "resumes " not in typed.out


def test_a_checkpoint_is_refused_where_a_restart_would_resume_a_later_one(copied: Path, train: Train) -> None:
    own, other = "runs/plain/mine/checkpoints/step_2.ckpt", "other.ckpt"
    shutil.copytree(copied / own, copied / other)
    for path in (own, other):
        refused = train(*RUN, f"resume={path}", "trainer.max_steps=3", folder=copied, check=False)
        assert refused.refusal == (
            f"{path} can't be resumed in runs/plain/mine, which has step_6.ckpt: a restart would resume that; "
            "leave out the path to go on from it, or give this run another run_id"
        )
    begun = train(*RUN, f"resume={own}", "run_id=another", "trainer.max_steps=3", folder=copied)
    assert f"resumes    {own}, at step 2" in begun.out


# What a run is told that was there before: what it has otherwise, and that it has ended


BEFORE_TRAINER = {"max_steps": 500, "strategy": {"_target_": "lightswitch.strategies.ddp.DDP", "num_nodes": 1}}
BEFORE = {
    "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95], "fused": False},
    "model": {"optimizer": {"lr": 3e-4, "betas": [0.9, 0.95], "fused": False}, "width": 64, "bias": None},
    "trainer": BEFORE_TRAINER,
    "run_id": "mine",
    "callbacks": {"throughput": {"_target_": "here"}},
}
FSDP = {"_target_": "lightswitch.strategies.fsdp.FSDP", "x": 2}
FUSED = {"lr": 3e-4, "betas": [0.9, 0.99], "fused": True}
SAME = {**BEFORE, "model": {**BEFORE["model"], "optimizer": "${optimizer}"}}


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (SAME, ""),
        ({**SAME, "scheduler": {"min_factor": 0.1}}, ""),  # a record has none where the module has its own
        ({**SAME, "run_id": "other", "callbacks": {}}, ""),
        ({**SAME, "optimizer": {**BEFORE["optimizer"], "lr": 1e-3}}, "optimizer.lr=0.001 (was 0.0003)"),
        ({**SAME, "trainer": {**BEFORE_TRAINER, "strategy": FSDP}}, "trainer.strategy=FSDP (was DDP)"),
        ({**SAME, "trainer": {**BEFORE_TRAINER, "strategy": "auto"}}, "trainer.strategy=auto (was DDP)"),
        (
            {**SAME, "trainer": {**BEFORE_TRAINER, "max_steps": 1000}, "optimizer": FUSED},
            "optimizer.betas=[0.9, 0.99] (was [0.9, 0.95]), optimizer.fused=true (was false), "
            "trainer.max_steps=1000 (was 500)",
        ),
        (
            {**SAME, "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]}, "seed": 2},
            "seed=2 (was not set)",
        ),
        (
            {**SAME, "a": 1, "b": 2, "c": 3, "d": 4},
            "a=1 (was not set), b=2 (was not set), c=3 (was not set) and 1 more",
        ),
    ],
)
def test_what_differs_is_told_once_and_briefly(now: dict, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(BEFORE))
    assert resume.changes_since(tmp_path, OmegaConf.create(now)) == told


def test_a_config_that_is_missing_or_harmed_tells_nothing(tmp_path: Path) -> None:
    assert resume.changes_since(tmp_path, OmegaConf.create(SAME)) == ""
    for content in (b"", b"\xff\xfe", b"a: [", b"- 1"):
        (tmp_path / "config.yaml").write_bytes(content)
        assert resume.changes_since(tmp_path, OmegaConf.create(SAME)) == ""


def test_a_run_that_goes_on_says_what_it_has_otherwise(train: Train) -> None:
    run = (*PLAIN, "run_id=mine", "model.lr=0.05", "trainer.val_check_interval=2")
    first = train(*run, "trainer.max_steps=2")
    finished = train(*run, "trainer.max_steps=2", "model.lr=0.01", folder=first.folder)
    assert finished.out.startswith(
        "finished   fit and test have ended at step 2, and model.lr=0.01 (was 0.05) has no effect; "
    )
    gone_on = train(*run, "trainer.max_steps=4", "model.lr=0.01", folder=first.folder)
    resumes = "resumes    runs/plainmodel/mine/checkpoints/step_2.ckpt, at step 2"
    assert f"{resumes}, with model.lr=0.01 (was 0.05), trainer.max_steps=4 (was 2)\n" in gone_on.out
    assert f"{resumes}, with" in (first.run_dir / "train.log").read_text()


def test_a_run_that_was_stopped_early_goes_on_with_more_patience(train: Train) -> None:
    run = (*PLAIN, "run_id=mine", "trainer.val_check_interval=1", "trainer.max_steps=9")
    run += ("callbacks=[default,early_stopping]", "callbacks.early_stopping.min_delta=100")  # which none improves by
    first = train(*run, "callbacks.early_stopping.patience=2")
    again = train(*run, "callbacks.early_stopping.patience=4", folder=first.folder)
    finished, go_on = again.out.splitlines()
    assert finished == "finished   fit and test have ended at step 3; resume=never starts anew"
    assert go_on.startswith("go on      resume=last")
    gone_on = train(*run, "callbacks.early_stopping.patience=4", "resume=last", folder=first.folder)
    assert {*gone_on.column("val/loss")} == {*range(5)}


# A run that has ended, and what tells so

SHORT = (
    *(*PLAIN, "run_id=mine", "trainer.max_steps=2", "trainer.val_check_interval=2", "logger=csv"),
    "~callbacks.lr_monitor",
)
CFG = OmegaConf.create(
    {"mode": "fit", "resume": "auto", "trainer": {"max_steps": 2, "max_epochs": None, "max_time": None}}
)


@pytest.mark.parametrize("content", ["", '{"ended": {"step": 2, "lim', "[]", '{"ended": {"step": 1}}'])
def test_a_damaged_record_has_no_end(content: str, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(run_dir=tmp_path, is_first=True, process=Process())
    resume.write_end(CFG, tmp_path, 2, None)
    assert resume.is_finished(CFG, run)
    (tmp_path / "run.json").write_text(content)
    assert not resume.is_finished(CFG, run)


@pytest.mark.nightly
def test_the_lock_of_a_start_that_was_killed_behind_the_end_is_removed(train: Train) -> None:
    first = train(*SHORT)
    (first.run_dir / ".lock").touch()
    assert "finished   fit and test have ended at step 2;" in train(*SHORT, folder=first.folder).out
    assert not (first.run_dir / ".lock").exists()
