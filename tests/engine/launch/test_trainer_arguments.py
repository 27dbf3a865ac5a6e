"""Each argument of the Trainer has its effect, or is refused in a line; a new one fails here until it is seen to."""

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

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, runs_in
from tests.engine.plain import PlainData
from tests.engine.requests import composed, composing, problems

REFUSED = {  # what is typed
    "accumulate_grad_batches": "2",
    "barebones": "true",
    "callbacks": "[]",
    "default_root_dir": "mine",
    "logger": "false",
    "model_registry": "mine",
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
ELSEWHERE = {  # the tests that show the effect, and what they type
    "accelerator": ("monitoring/test_step_times.py", "trainer.accelerator="),
    "check_val_every_n_epoch": ("launch/habits.py", "trainer.check_val_every_n_epoch="),
    "devices": ("launch/habits.py", "trainer.devices="),
    "fast_dev_run": ("launch/test_choices.py", "one_batch"),
    "max_epochs": ("launch/habits.py", "trainer.max_epochs="),
    "max_steps": ("launch/habits.py", "trainer.max_steps="),
    "num_nodes": ("preflight/test_environment.py", "trainer.num_nodes="),
    "overfit_batches": ("launch/test_choices.py", "overfit"),
    "precision": ("test_every_switch.py", "precision"),
    "profiler": ("launch/test_launchers.py", "trainer.profiler="),
    "strategy": ("launch/habits.py", "trainer.strategy="),
    "sync_batchnorm": ("launch/habits.py", "trainer.sync_batchnorm="),
    "val_check_interval": ("launch/habits.py", "trainer.val_check_interval="),
}


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


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    given = [f"trainer.{name}={typed}" for name, (typed, _) in EFFECTS.items()]
    here = "tests.engine.launch.test_trainer_arguments"
    classes = (PLAIN[0], f"data._target_={here}.Reloaded", f"callbacks.effects._target_={here}.Effects")
    train = runs_in(tmp_path_factory.mktemp("ran"))
    return train(*classes, "global_batch_size=20", "trainer.max_epochs=3", *given)


def test_every_argument_is_known() -> None:
    known = [*REFUSED, *EFFECTS, *ELSEWHERE]
    assert sorted(known) == sorted(inspect.signature(Trainer).parameters)


@pytest.mark.parametrize("argument", REFUSED)
def test_an_argument_that_would_do_nothing_is_refused(argument: str, tmp_path: Path) -> None:
    with composing():
        (line,) = problems(composed(*PLAIN, f"trainer.{argument}={REFUSED[argument]}", into=tmp_path))
    assert re.match(rf"trainer\.{argument}[ =:].* (type \S|leave it out$)", line), line


@pytest.mark.parametrize("argument", EFFECTS)
def test_an_argument_has_its_effect(argument: str, ran: Finished) -> None:
    found = json.loads((ran.folder / "effects.json").read_text())
    assert found[argument] == EFFECTS[argument][1]


@pytest.mark.parametrize("argument", ELSEWHERE)
def test_an_argument_is_tried_elsewhere(argument: str) -> None:
    file, typed = ELSEWHERE[argument]
    assert typed in (CHECKOUT / "tests/engine" / file).read_text()
