"""The engine's loop over batches shows, computes and calls what Lightning's does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightswitch.loop.loops import replace_loops
from tests.engine.launch.hooked import Logging, Shown, trained_by
from tests.engine.plain import PlainData, PlainModel


def test_what_is_logged_is_shown_at_the_same_steps(tmp_path: Path) -> None:
    expected = _shown(tmp_path, lambda trainer: None)
    assert {"train/loss", "train/both_step", "train/both_epoch", "train/mean"} <= expected[-1]["callback"].keys()
    assert _shown(tmp_path, replace_loops) == expected


def test_a_value_that_a_bar_shows_is_read_once(tmp_path: Path) -> None:
    class LoggingOnce(PlainModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.log("train/loss", loss, prog_bar=True)
            return loss

    def readings(arrange: Callable[[Trainer], None]) -> int:
        trainer = trained_by(tmp_path, [], max_epochs=1, limit_val_batches=0)
        arrange(trainer)
        with Readings() as counted:
            trainer.fit(LoggingOnce(), PlainData())
        return counted.count

    assert readings(lambda trainer: None) - readings(replace_loops) == 3  # of 4 batches


def test_a_step_takes_few_calls_of_python(tmp_path: Path) -> None:
    def calls(arrange: Callable[[Trainer], None]) -> int:
        counting = CountingCalls()
        trainer = trained_by(tmp_path, [counting], max_epochs=1, limit_val_batches=0)
        arrange(trainer)
        trainer.fit(PlainModel(), PlainData())
        return counting.calls

    assert calls(replace_loops) < 0.85 * calls(lambda trainer: None)  # with no help of loop/loops.py


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_are_the_same_to_the_bit(accumulation: int, tmp_path: Path) -> None:
    def weights(arrange: Callable[[Trainer], None]) -> dict[str, Tensor]:
        seed_everything(1, verbose=False)
        model = PlainModel()
        trainer = trained_by(tmp_path, [], max_epochs=2, accumulate_grad_batches=accumulation)
        arrange(trainer)
        trainer.fit(model, PlainData())
        return model.state_dict()

    torch.testing.assert_close(weights(replace_loops), weights(lambda trainer: None), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # which Lightning says once a process
def test_a_step_that_is_replaced_between_epochs_gets_the_arguments_it_takes(tmp_path: Path) -> None:
    class Replacing(PlainModel):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.training_step = lambda batch: self.took.append(batch)  # type: ignore[method-assign]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.took: list[Any] = []
            return super().training_step(batch, batch_idx)

    model, trainer = Replacing(), trained_by(tmp_path, [], max_epochs=2, limit_val_batches=0)
    replace_loops(trainer)
    trainer.fit(model, PlainData())
    assert len(model.took) == 4


class CountingCalls(Callback):
    """Counts the calls of functions from the start of the third batch to that of the fourth."""

    calls = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self._count if batch_idx == 2 else None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


class Readings(TorchDispatchMode):
    """Counts how often a tensor's value is read: on a GPU, the process would wait each time."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _shown(folder: Path, arrange: Callable[[Trainer], None]) -> list[dict[str, dict[str, float]]]:
    seed_everything(1, verbose=False)
    shown = Shown()
    trainer = trained_by(folder, [shown], max_epochs=2, val_check_interval=3)
    arrange(trainer)
    trainer.fit(Logging(), PlainData())
    return shown.seen


def test_an_error_at_the_end_of_an_epoch_without_a_batch_ends_a_run_that_was_not_resumed(tmp_path: Path) -> None:
    """The engine lets it pass where the batches were read by the process before."""

    class Gathering(PlainModel):
        def on_train_epoch_start(self) -> None:
            self.trainer.should_stop = True

        def on_train_epoch_end(self) -> None:
            torch.stack([])

    trainer = trained_by(tmp_path, [], max_epochs=2, limit_val_batches=0)
    replace_loops(trainer)
    with pytest.raises(RuntimeError, match="non-empty"):
        trainer.fit(Gathering(), PlainData())


def test_a_hook_that_the_module_has_set_itself_is_called_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    ended: list[int] = []
    model = PlainModel()
    model.on_train_epoch_end = lambda: ended.append(model.current_epoch)  # type: ignore[method-assign]
    trainer = trained_by(tmp_path, [], max_epochs=3, limit_val_batches=0)
    replace_loops(trainer)
    trainer.fit(model, PlainData())
    assert ended == [0, 1, 2]
