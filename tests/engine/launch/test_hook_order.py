"""The hooks of a whole run, by train.py: those of a plain Trainer, in its order, in each stage and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.launch import hooked

SAVING = {"every_n_train_steps": 3, "save_top_k": -1, "save_on_train_epoch_end": False}
LIMITS = {
    **{"max_steps": 8, "val_check_interval": 2, "check_val_every_n_epoch": None},
    **{"gradient_clip_val": 1.0, "log_every_n_steps": 10, "enable_progress_bar": False},
}
RUN = (
    *(f"{node}._target_=tests.engine.launch.hooked.{name}" for node, name in (("model", "Model"), ("data", "Data"))),
    *("callbacks.told._target_=tests.engine.launch.hooked.Teller", "logger=csv", "~callbacks.lr_monitor"),
    *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "~callbacks.progress", "~callbacks.throughput"),
    *("callbacks.mine._target_=lightning.pytorch.callbacks.ModelCheckpoint", "callbacks.mine.dirpath=saved"),
    *(f"callbacks.mine.{name}={json.dumps(value)}" for name, value in SAVING.items()),
    *(f"trainer.{name}={json.dumps(value)}" for name, value in LIMITS.items()),
    *("global_batch_size=40", "data.batch_size=40"),
)
Calls = list[list[Any]]


class AfterSetup(SingleDeviceStrategy):
    """Reads a checkpoint once the model is set up, as Lightning's sharded strategies do, and all of the engine's."""

    restore_checkpoint_after_setup = True


class Fitted(NamedTuple):
    run: Finished
    calls: Calls
    plain: Path  # the folder of a plain Trainer's run
    expected: Calls


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("plain")
    run = runs_in(tmp_path_factory.mktemp("ours"))(*RUN)
    return Fitted(run, _calls(run), folder, _plain(folder, fit_and_test))


def test_a_fit_and_its_test_call_what_a_plain_trainer_calls(fitted: Fitted) -> None:
    hooks = {call[1] for call in fitted.expected}
    assert {"on_save_checkpoint", "on_sanity_check_start", "on_train_epoch_end", "on_test_end"} <= hooks
    assert fitted.calls == fitted.expected


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_a_resume_in_mid_epoch_calls_what_a_plain_trainer_calls(fitted: Fitted, train: Train) -> None:
    resumed = train(*RUN, f"ckpt_path='{saved(fitted.run.folder)}'")
    expected = _plain(fitted.plain, fit_and_test, saved(fitted.plain))
    assert "on_load_checkpoint" in {call[1] for call in expected}
    assert _calls(resumed) == expected


@pytest.mark.parametrize("mode", ["validate", "predict"])
def test_a_stage_by_itself_calls_what_a_plain_trainer_calls(mode: str, fitted: Fitted, train: Train) -> None:
    evaluated = train(*RUN, f"mode={mode}", f"ckpt_path='{saved(fitted.run.folder)}'")
    assert _calls(evaluated) == _plain(fitted.plain, _evaluate, mode, saved(fitted.plain))


def fit_and_test(trainer: Trainer, told: tuple[Any, Any], path: Path | None = None) -> None:
    trainer.fit(*told, ckpt_path=path, weights_only=True)
    (saving,) = trainer.checkpoint_callbacks
    trainer.test(*told, ckpt_path=saving.best_model_path, verbose=False, weights_only=True)


def _evaluate(trainer: Trainer, told: tuple[Any, Any], mode: str, path: Path) -> None:
    getattr(trainer, mode)(*told, ckpt_path=path, weights_only=True)


def _plain(folder: Path, run: Callable[..., None], *given: Any) -> Calls:
    """Return the calls of hooks in a run by Lightning alone."""
    seen: list[hooked.Call] = []
    model, data, callback = hooked.told_to(seen)
    saving = ModelCheckpoint(dirpath=folder / "saved", **SAVING)
    trainer = Trainer(
        **LIMITS,
        strategy=AfterSetup("cpu"),
        accelerator="cpu",
        callbacks=[callback(), saving],
        default_root_dir=folder,
        logger=False,
        enable_model_summary=False,
    )
    run(trainer, (model(), data(batch_size=40)), *given)
    return [list(call) for call in seen]


def saved(folder: Path) -> Path:
    (path,) = (folder / "saved").glob("*step=3.ckpt")
    return path


def _calls(run: Finished) -> Calls:
    return [json.loads(line) for line in (run.folder / "hooks_0.jsonl").read_text().splitlines()]
