"""Debug choices, callbacks, loggers, optimizers and modes on the command line, in runs for real."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightswitch.checkpoints.directory import read_state
from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.tiny import LANGUAGE_MODEL, RECORD, TEXT

ON_CPU = (*PLAIN, "trainer.accelerator=cpu")
SHORT = (*ON_CPU, "run_id=mine", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1")
DEBUG = ("limit", "one_batch", "overfit", "profiler")


# debug=


@pytest.fixture(scope="module")
def debugged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """A run by debug choice."""
    train = runs_in(tmp_path_factory.mktemp("debug"))
    return {choice: train(*ON_CPU, *RECORD, "trainer.max_steps=20", f"debug={choice}") for choice in DEBUG}


def test_one_batch_runs_every_stage_and_leaves_no_checkpoint(debugged: dict[str, Finished]) -> None:
    run_dir = debugged["one_batch"].run_dir
    assert len(_steps(run_dir)) == 1
    assert list(run_dir.glob("checkpoints/*")) == []


def test_limit_cuts_every_stage_short(debugged: dict[str, Finished]) -> None:
    assert list(debugged["limit"].column("train/loss")) == list(range(20))
    assert list(debugged["limit"].column("val/loss")) == [9, 19]
    assert len(debugged["limit"].column("test/loss")) == 1


def test_overfit_reads_the_same_samples_over_and_over(debugged: dict[str, Finished]) -> None:
    steps = _steps(debugged["overfit"].run_dir)
    assert len(steps) == 20
    assert len({tuple(sorted(ids)) for ids in steps}) == 1
    loss = debugged["overfit"].column("train/loss")
    assert loss[19] < loss[0] / 2


def test_profiler_leaves_a_table_in_the_run_directory(debugged: dict[str, Finished]) -> None:
    run = debugged["profiler"]
    (table,) = run.run_dir.glob("fit-profile*.txt")
    assert "run_training_batch" in table.read_text()
    assert re.search(rf"^profile +.*runs/plainmodel/{run.run_dir.name}/{table.name}", run.out, re.MULTILINE)


def _steps(run_dir: Path) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in (run_dir / "samples_0.jsonl").read_text().splitlines()]


# callbacks and loggers


def test_callbacks_and_loggers_are_switched_by_name(train: Train) -> None:
    run = train(
        *SHORT,
        "trainer.max_steps=4",
        "callbacks=[default,early_stopping,grad_norm,device_monitor,model_summary]",
        "~callbacks.throughput",
        "callbacks.early_stopping.patience=2",
        "~logger.tensorboard",
        "trainer.limit_val_batches=2",
    )
    columns = run.metrics()[0].keys()  # of those that a run has by default, throughput/… is missing
    assert any("grad_norm" in name for name in columns)
    assert not any(name.startswith("throughput/") for name in columns)
    assert any(name.startswith("lr-") for name in columns)
    assert not (run.run_dir / "tensorboard").exists()
    assert list(run.column("val/loss")) == [1, 3]


@pytest.mark.nightly
@pytest.mark.skipif(
    find_spec("mlflow") is None and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"), reason="MLflow is an extra"
)
def test_mlflow_stands_beside_the_default_loggers(train: Train) -> None:
    run = train(*SHORT, "trainer.max_steps=2", "logger=[default,mlflow]")
    assert (run.run_dir / "tensorboard").exists()
    assert list(run.column("val/loss")) == [1]
    assert (run.folder / "runs" / "mlflow.db").exists()


# optimizer and scheduler


TINY = (*LANGUAGE_MODEL, TEXT, "model.layers=1", "model.width=16", "trainer.accelerator=cpu", "run_id=mine")


def test_optimizer_and_scheduler_are_replaced_and_the_rate_follows_the_batch(train: Train) -> None:
    run = train(
        *TINY,
        "trainer.max_steps=6",
        "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=6",
        "optimizer._target_=torch.optim.SGD",
        "optimizer.lr=0.1",
        "scheduler._target_=torch.optim.lr_scheduler.StepLR",
        "scheduler.step_size=2",
        "scheduler.gamma=0.5",
        "global_batch_size=16",
        "lr_scaling.rule=linear",
    )
    assert "learning rate 0.1 tuned at a global batch of 64 becomes 0.025 at 16 (linear rule)" in run.out
    rates = run.column("lr-SGD/pg1")
    assert rates == pytest.approx({0: 0.025, 1: 0.025, 2: 0.0125, 3: 0.0125, 4: 0.00625, 5: 0.00625})


def test_a_constant_schedule_leaves_the_rate_as_it_is(train: Train) -> None:
    steps = ("trainer.max_steps=3", "trainer.val_check_interval=3", "trainer.log_every_n_steps=1")
    run = train(*TINY, *steps, "scheduler=constant")
    assert set(run.column("lr-AdamW/pg1").values()) == {3e-3}


# modes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    train = runs_in(tmp_path_factory.mktemp("trained"))
    return train(*SHORT, "trainer.max_steps=4", "trainer.limit_val_batches=1.0")


def test_a_checkpoint_is_evaluated_as_it_was_in_training(trained: Finished, train: Train) -> None:
    checkpoint = trained.run_dir / "checkpoints" / "last.ckpt"
    validated, tested = (train(*ON_CPU, f"mode={mode}", f"ckpt_path={checkpoint}") for mode in ("validate", "test"))
    assert validated.column("val/loss") == {4: pytest.approx(trained.column("val/loss")[3], abs=1e-6)}
    assert tested.column("test/loss").keys() == {4}
    assert tested.column("test/loss") == pytest.approx(trained.column("test/loss"), abs=1e-6)
    assert not list(tested.folder.rglob("*.ckpt"))
    assert f"reads      {checkpoint}" in tested.out


def test_the_best_checkpoint_is_tested_and_not_the_last_weights(train: Train) -> None:
    first = train(*SHORT, "trainer.max_steps=6", "model.lr=1.0")
    best, last = (first.run_dir / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    best_val, last_val, best_test, last_test = (
        next(iter(train(*ON_CPU, f"mode={mode}", f"ckpt_path={path}").column(metric).values()))
        for mode, metric in (("validate", "val/loss"), ("test", "test/loss"))
        for path in (best, last)
    )
    assert best_val < last_val
    assert best_val == min(first.column("val/loss").values())
    assert last_val == first.column("val/loss")[5]
    assert list(first.column("test/loss").values()) == [best_test]
    assert best_test != last_test


def test_a_run_from_another_ones_checkpoint_keeps_the_best_of_its_own(trained: Finished, train: Train) -> None:
    moved = train(*SHORT, "run_id=moved", "trainer.max_steps=8", f"resume={trained.run_dir}/checkpoints/last.ckpt")
    assert moved.err == ""
    step = read_state(moved.run_dir / "checkpoints" / "best.ckpt")["global_step"]
    losses = moved.column("val/loss")
    assert (sorted(losses), losses[step - 1]) == ([5, 7], min(losses.values()))


def test_a_missing_checkpoint_is_told_with_those_that_are_there(trained: Finished, train: Train) -> None:
    there = sorted(path.name for path in trained.run_dir.glob("checkpoints/*.ckpt"))
    missing = trained.run_dir / "checkpoints" / "newest.ckpt"
    refused = train(*PLAIN, "mode=test", f"ckpt_path={missing}", check=False)
    assert refused.err == f"error: ckpt_path={missing}: there is no such file; that folder has {', '.join(there)}\n"
    assert {"best.ckpt", "last.ckpt"} <= set(there)
