"""Debug choices, callbacks, loggers, optimizers, modes and the Trainer's arguments on the command line, in runs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, Timer

from lightswitch.checkpoints.directory import read_state
from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.plain import PlainData
from tests.engine.requests import composed, composing, problems
from tests.engine.tiny import LANGUAGE_MODEL, RECORD, TEXT

ON_CPU = (*PLAIN, "trainer.accelerator=cpu")
SHORT = (*ON_CPU, "run_id=mine", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1")


# debug=


def _debug(choice: str, train: Train) -> Finished:
    return train(*ON_CPU, *RECORD, "trainer.max_steps=20", f"debug={choice}")


def test_one_batch_runs_every_stage_and_leaves_no_checkpoint(train: Train) -> None:
    run = _debug("one_batch", train)
    assert len(_steps(run.run_dir)) == 1
    assert list(run.run_dir.glob("checkpoints/*")) == []


@pytest.mark.nightly
def test_limit_cuts_every_stage_short(train: Train) -> None:
    run = _debug("limit", train)
    assert [list(run.column("train/loss")), list(run.column("val/loss"))] == [list(range(20)), [9, 19]]
    assert len(run.column("test/loss")) == 1


def test_overfit_reads_the_same_samples_over_and_over(train: Train) -> None:
    run = _debug("overfit", train)
    steps, loss = _steps(run.run_dir), run.column("train/loss")
    assert len(steps) == 20
    assert len({tuple(sorted(ids)) for ids in steps}) == 1
    assert loss[19] < loss[0] / 2


@pytest.mark.nightly
def test_profiler_leaves_a_table_in_the_run_directory(train: Train) -> None:
    run = _debug("profiler", train)
    (table,) = run.run_dir.glob("fit-profile*.txt")
    assert "run_training_batch" in table.read_text()


def _steps(run_dir: Path) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in (run_dir / "samples_0.jsonl").read_text().splitlines()]


# callbacks and loggers


def test_callbacks_and_loggers_are_switched_by_name(train: Train) -> None:
    run = train(
        *(*SHORT, "trainer.max_steps=4", "trainer.limit_val_batches=2", "~logger.tensorboard", "~callbacks.throughput"),
        "callbacks=[default,early_stopping,grad_norm,device_monitor,model_summary]",
        "callbacks.early_stopping.patience=2",
    )
    columns = run.metrics()[0].keys()  # of those that a run has by default, throughput/… is missing
    assert any("grad_norm" in name for name in columns)
    assert not any(name.startswith("throughput/") for name in columns)
    assert any(name.startswith("lr-") for name in columns)
    assert not (run.run_dir / "tensorboard").exists()
    assert list(run.column("val/loss")) == [1, 3]


# optimizer and scheduler


TINY = (*LANGUAGE_MODEL, TEXT, "model.layers=1", "model.width=16", "trainer.accelerator=cpu", "run_id=mine")


def test_optimizer_and_scheduler_are_replaced_and_the_rate_follows_the_batch(train: Train) -> None:
    run = train(
        *(*TINY, "trainer.max_steps=6", "trainer.log_every_n_steps=1", "trainer.val_check_interval=6"),
        *("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1", "global_batch_size=16", "lr_scaling.rule=linear"),
        *("scheduler._target_=torch.optim.lr_scheduler.StepLR", "scheduler.step_size=2", "scheduler.gamma=0.5"),
    )
    assert "learning rate 0.1 tuned at a global batch of 64 becomes 0.025 at 16 (linear rule)" in run.out
    rates = run.column("lr-SGD/pg1")
    assert rates == pytest.approx({0: 0.025, 1: 0.025, 2: 0.0125, 3: 0.0125, 4: 0.00625, 5: 0.00625})


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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


# arguments of the Trainer


REFUSED = {  # what is typed
    "accumulate_grad_batches": "2",
    "callbacks": "[]",
    "default_root_dir": "mine",
    "logger": "false",
    "plugins": "[]",
    "use_distributed_sampler": "true",
}
EFFECTS: dict[str, tuple[str, Any]] = {  # what is typed, and what `Effects` finds in the run's second epoch
    "benchmark": ("true", True),
    "detect_anomaly": ("true", True),
    "deterministic": ("true", True),
    "enable_autolog_hparams": ("false", False),
    "enable_checkpointing": ("false", 0),
    "enable_model_summary": ("true", 1),
    "enable_progress_bar": ("false", 0),
    "gradient_clip_algorithm": ("value", "value"),
    "gradient_clip_val": ("0.3", 0.3),
    "inference_mode": ("false", True),
    "limit_predict_batches": ("5", 5),
    "limit_test_batches": ("2", 2),
    "limit_train_batches": ("4", 4),
    "limit_val_batches": ("3", 3),
    "log_every_n_steps": ("3", 3),
    "max_time": ("00:01:00:00", 1),
    "min_epochs": ("2", 2),
    "min_steps": ("2", 2),
    "num_sanity_val_steps": ("1", 1),
    "reload_dataloaders_every_n_epochs": ("1", 2),
}
ELSEWHERE = [  # others show the effect: habits.yaml, debug= above, every switch, preflight, step times
    *("accelerator", "check_val_every_n_epoch", "devices", "fast_dev_run", "max_epochs", "max_steps", "num_nodes"),
    *("overfit_batches", "precision", "profiler", "strategy", "sync_batchnorm", "val_check_interval"),
    *("barebones", "model_registry"),  # Lightning's: it refuses checkpoints and loggers beside the first
]


class Reloaded(PlainData):
    """Counts how often its training loader is asked for; there are three epochs."""

    asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return super().train_dataloader()


class Effects(Callback):
    """Writes what the arguments have come to, in the second epoch."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.current_epoch == 1:
            Path("effects.json").write_text(json.dumps(_effects(trainer)))


def _effects(trainer: Trainer) -> dict[str, Any]:
    plain = [name for name in EFFECTS if name.startswith(("limit_", "log_", "gradient_", "num_sanity", "min_"))]

    def count(kind: type) -> int:
        return sum(isinstance(callback, kind) for callback in trainer.callbacks)

    return {
        **{name: getattr(trainer, name) for name in plain},
        "benchmark": torch.backends.cudnn.benchmark,
        "detect_anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "enable_autolog_hparams": trainer.enable_autolog_hparams,
        "enable_checkpointing": count(Checkpoint),
        "enable_model_summary": count(ModelSummary),
        "enable_progress_bar": count(ProgressBar),
        "inference_mode": not trainer.fit_loop.epoch_loop.val_loop.inference_mode,
        "max_time": count(Timer),
        "reload_dataloaders_every_n_epochs": trainer.datamodule.asked,
    }


def test_every_argument_is_known() -> None:
    known = [*REFUSED, *EFFECTS, *ELSEWHERE]
    assert sorted(known) == sorted(inspect.signature(Trainer).parameters)


def test_an_argument_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    for argument, typed in REFUSED.items():
        with composing():
            (line,) = problems(composed(*PLAIN, f"trainer.{argument}={typed}", into=tmp_path))
        assert re.match(rf"trainer\.{argument}[ =:].* (type \S|leave it out$)", line), line


def test_each_argument_has_its_effect(train: Train) -> None:
    here = "tests.engine.launch.test_choices"
    classes = (PLAIN[0], f"data._target_={here}.Reloaded", f"callbacks.effects._target_={here}.Effects")
    given = [f"trainer.{name}={typed}" for name, (typed, _) in EFFECTS.items()]
    run = train(*classes, "global_batch_size=20", "trainer.max_epochs=3", *given)
    found = json.loads((run.folder / "effects.json").read_text())
    assert found == {name: effect for name, (_, effect) in EFFECTS.items()}
