"""On a GPU, the process waits for nothing in a step that is not logged: it queues work, and goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.engine.conftest import Train
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS

FIRST, LAST = 3, 8  # steps that are counted, after those in which memory is allocated, and before one that is logged
RUN = (*LANGUAGE, *NO_CHECKPOINTS, "trainer.accelerator=gpu", "trainer.max_steps=10", "trainer.val_check_interval=10")
RUN += ("trainer.log_every_n_steps=10",)
COUNTED = ("callbacks.waits._target_=tests.engine.strategies.test_synchronisation.Waits",)


class Waits(pl.Callback):
    """Prints what torch warns of from the first of the steps to the last, the loading of batches included."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index % trainer.accumulate_grad_batches:
            return
        if trainer.global_step == FIRST:
            self._catching = warnings.catch_warnings(record=True)
            self._caught = self._catching.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif trainer.global_step == LAST:
            torch.cuda.set_sync_debug_mode("default")
            self._catching.__exit__(None, None, None)
            found = list(waits(self._caught))
            print(f"waited {len(found)} times", *found)


def waits(caught: Iterable[warnings.WarningMessage]) -> Iterator[str]:
    """Where the process waited for its device, by torch's warnings: the mode's own, that it is a prototype, is none."""
    return (f"{one.filename}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message))


def test_what_torch_warns_of_the_mode_itself_is_no_wait() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("Synchronization debug mode ... does not yet detect all synchronizing operations", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert len(list(waits(caught))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "fsdp_grad_op"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_that_is_not_logged_waits_for_nothing(strategy: str, precision: str, train: Train) -> None:
    run = train(*RUN, *COUNTED, f"strategy={strategy}", f"precision={precision}")
    assert "waited 0 times" in run.out, run.out


@pytest.mark.gpu
def test_a_wait_would_be_counted(train: Train) -> None:
    run = train(*RUN, *COUNTED, "strategy=single", "trainer.log_every_n_steps=2")
    assert "waited 0 times" not in run.out
    assert "times" in run.out
