"""On a GPU, the process waits for nothing in a step that is not logged: it queues work, and goes on.

Without a GPU, the engine's code is watched for what would wait: reads of values that were computed on the device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import lightswitch
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


READS = {Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
READS |= {Tensor.__index__, Tensor.__format__, Tensor.__repr__}


class Reads(TorchFunctionMode):
    """Finds where the engine reads the value of a tensor that comes from given ones, which a GPU would have."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.on_device = WeakIdKeyDictionary(dict.fromkeys(tensors))
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one in self.on_device]
        if given and (func in READS or (func is Tensor.to and "cpu" in map(str, args))):
            frame = sys._getframe(1)
            # torch's own functions move to where a tensor is: here, that is the CPU
            while func is not Tensor.to and "/torch/" in frame.f_code.co_filename and frame.f_back:
                frame = frame.f_back
            if lightswitch.__path__[0] in frame.f_code.co_filename:
                self.found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        out = func(*args, **(kwargs or {}))
        if given and func not in READS:
            self.on_device.update(dict.fromkeys(one for one in tree_leaves(out) if isinstance(one, Tensor)))
        return out


class Watched(pl.Callback):
    """Prints what `Reads` finds from the first of the steps to the last; weights, states, batches are the device's."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == FIRST:
            states = (value for state in trainer.optimizers[0].state.values() for value in state.values())
            large = [one for one in states if isinstance(one, Tensor) and one.ndim]  # counts of steps are on the CPU
            self.reads = Reads([*module.parameters(), *module.buffers(), *large])
            self.reads.__enter__()
        elif trainer.global_step == LAST:
            self.reads.__exit__(None, None, None)
            print(f"read {len(self.reads.found)} values", *self.reads.found)
        if FIRST <= trainer.global_step < LAST:
            self.reads.on_device.update(dict.fromkeys(one for one in tree_leaves(batch) if isinstance(one, Tensor)))


WATCHED = tuple(word.replace("=gpu", "=cpu") for word in RUN)
WATCHED += ("callbacks.watched._target_=tests.engine.strategies.test_synchronisation.Watched",)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.nightly), ("fsdp", 2)],
)
def test_the_engine_reads_no_value_of_the_device_in_a_step_that_is_not_logged(
    strategy: str, ranks: int, train: Train
) -> None:
    clipped = ("trainer.gradient_clip_val=1.0", "on_nan=ignore")  # a loss on the CPU is checked at once, by its value
    run = train(*WATCHED, *clipped, f"strategy={strategy}", ranks=ranks)
    assert "read 0 values" in run.out, run.out


def test_a_value_that_is_read_would_be_found(train: Train) -> None:
    run = train(*WATCHED, "strategy=single")
    assert "read 0 values" not in run.out
    assert "failures/stopping.py" in run.out


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
