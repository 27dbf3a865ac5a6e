"""Errors of a module's steps that are of the strategy it trains under, told in a line.

Most of what a module may do trains under every strategy. Some operations meet the parameters in the form in which the
strategy keeps them: a shard, an empty tensor, one that can't be copied. They fail in the first steps.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightswitch.errors import NeedsValues, Refused
from lightswitch.failures.classify import raised_in
from lightswitch.strategies.sharded import first_name

STEPS = 3  # of a process that count as its first
_KINDS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
_OTHERS = (torch.OutOfMemoryError, torch.distributed.DistError, NeedsValues)  # have lines of their own
_SKIPPED = "by returning"  # of Lightning's errors where a step gives None
_LIBRARIES = ("torch", "deepspeed", "lightning")


@contextmanager
def refusing(trainer: Trainer, steps: int) -> Iterator[None]:
    """Context of what a module does in a step, whose errors are told in a line where they are the strategy's.

    Args:
        steps: that this process has made before.

    Raises:
        Refused: in the place of such an error.
    """
    try:
        yield
    except Exception as error:
        if (line := _refused(error, trainer, steps)) is not None:
            raise line from error
        raise


def refusing_in_evaluation(trainer: Trainer) -> AbstractContextManager[None]:
    """Return the same context for a step of an evaluation, whose first batches count as its first steps."""
    loop: Any = trainer._active_loop
    return refusing(trainer, loop.batch_progress.current.ready - 1)


def _refused(error: Exception, trainer: Trainer, steps: int) -> Refused | None:
    """Return the line for an error of a step; None for one of the module's own, or where parameters are whole.

    What code of the module's own raises on purpose is its own error.
    """
    name = first_name(trainer.lightning_module)
    if _SKIPPED in str(error) and isinstance(error, RuntimeError | MisconfigurationException):
        return _told(
            error,
            f"{name}.training_step returns None in automatic optimization, and several devices have to train on each "
            "batch; return a loss (of a batch to be skipped, 0 times its loss), or set "
            "self.automatic_optimization = False where it steps by hand",
        )
    is_whole = isinstance(trainer.strategy, SingleDeviceStrategy) or (
        isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
    )
    if is_whole or steps >= STEPS or not isinstance(error, _KINDS) or isinstance(error, _OTHERS):
        return None
    frame = raised_in(error)
    if frame is not None and _package(frame.f_globals.get("__name__")) not in _LIBRARIES:
        return None
    told = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
    return _told(
        error,
        f"{name} fails in its first steps under {type(trainer.strategy).__name__}, which spreads parameters "
        f"over devices{_place(error)}: {told}; use strategy=ddp, which keeps them whole. If it fails there, too, the "
        "fault is its own. The traceback is in train.log",
    )


def _told(error: Exception, line: str) -> Refused:
    refusal = Refused(line)
    refusal.details = "".join(traceback.format_exception(error))
    return refusal


def _place(error: Exception) -> str:
    """Return the innermost line that is not a library's, in words."""
    frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [at for at in frames if _package(at[0].f_globals.get("__name__")) not in (*_LIBRARIES, "lightswitch")]
    if not own:
        return ""
    frame, number = own[-1]
    return f", in {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]}:{number})"


def _package(module: object) -> str:
    return str(module).partition(".")[0]
