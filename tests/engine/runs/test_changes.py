"""What a run is told that was there before: what it has otherwise, and that it has ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightswitch.process import Process
from lightswitch.runs import finished, saved
from tests.engine.conftest import PLAIN, Train

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
            "~optimizer.fused (was false), seed=2 (was not set)",
        ),
        (
            {**SAME, "a": 1, "b": 2, "c": 3, "d": 4},
            "a=1 (was not set), b=2 (was not set), c=3 (was not set) and 1 more",
        ),
    ],
)
def test_what_differs_is_told_once_and_briefly(now: dict, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(BEFORE))
    assert saved.changes_since(tmp_path, OmegaConf.create(now)) == told


def test_a_config_that_is_missing_or_harmed_tells_nothing(tmp_path: Path) -> None:
    assert saved.changes_since(tmp_path, OmegaConf.create(SAME)) == ""
    for content in (b"", b"\xff\xfe", b"a: [", b"- 1"):
        (tmp_path / "config.yaml").write_bytes(content)
        assert saved.changes_since(tmp_path, OmegaConf.create(SAME)) == ""


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
    again = train(*run, "callbacks.early_stopping.patience=2", folder=first.folder)
    assert again.out.startswith("finished   fit and test have ended at step 3; ")
    gone_on = train(*run, "callbacks.early_stopping.patience=4", folder=first.folder)
    assert {*gone_on.column("val/loss")} == {*range(5)}


# A run that has ended, and what tells so

RUN = (
    *(*PLAIN, "run_id=mine", "trainer.max_steps=2", "trainer.val_check_interval=2", "logger=csv"),
    "~callbacks.lr_monitor",
)
UNFIT = [
    b'{"step": 1, "limits": {}, "go_on": null}',
    b'{"step": 1, "limits": {"max_steps": "abc", "max_epochs": null, "max_time": null}, "go_on": null}',
    b'{"step": "1", "limits": {"max_steps": 2, "max_epochs": null, "max_time": null}, "go_on": null}',
    b"[" * 100_000,
]


CFG = OmegaConf.create(
    {"mode": "fit", "resume": "auto", "trainer": {"max_steps": 2, "max_epochs": None, "max_time": None}}
)


@pytest.mark.parametrize("content", [b"", b'{"step": 2, "lim', b"\xff\xfe\x00", b"[]", *UNFIT])
def test_a_harmed_note_of_the_end_is_passed_over(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run: Any = SimpleNamespace(run_dir=tmp_path, is_first=True, process=Process())
    finished.keep(CFG, tmp_path, 2, None)
    assert finished.before(CFG, run)
    (tmp_path / "ended.json").write_bytes(content)
    assert not finished.before(CFG, run)
    assert caplog.text.count("ended.json can't be read; the run uses its checkpoints instead\n") == 1


@pytest.mark.nightly
def test_a_directory_in_its_place_is_passed_over_and_kept(train: Train) -> None:
    first = train(*RUN)
    first_test = first.column("test/loss")
    (first.run_dir / "ended.json").unlink()
    (first.run_dir / "ended.json").mkdir()
    again = train(*RUN, folder=first.folder)
    assert "resumes    runs/plainmodel/mine/checkpoints/step_2.ckpt, at step 2\n" in again.out
    assert again.column("test/loss") == first_test
    assert again.out.count("can't be read; the run uses its checkpoints instead\n") == 1
    assert (again.err, (first.run_dir / "ended_1.json").is_dir()) == ("", True)
    (first.run_dir / ".lock").touch()  # as of a process that was killed behind the mark
    assert "finished   fit and test have ended at step 2;" in train(*RUN, folder=first.folder).out
    assert not (first.run_dir / ".lock").exists()
