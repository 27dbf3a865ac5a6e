"""The first steps under a strategy: one-line messages for errors that the strategy causes."""

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
from lightswitch.failures.classify import is_of_another_rank_or_device, raised_in
from lightswitch.strategies.sharded import first_name

STEPS = 3  # number of a process's steps that count as its first
_KINDS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, KeyError)
_OTHERS = (torch.OutOfMemoryError, torch.distributed.DistError, NeedsValues)  # reported with messages of their own
_SKIPPED = "by returning"  # in Lightning's errors about a step that returns None
_READY_TWICE = "Expected to mark a variable ready only once"  # in torch's error about a gradient
_LIBRARIES = ("torch", "deepspeed", "lightning")


@contextmanager
def refusing(trainer: Trainer, steps: int) -> Iterator[None]:
    """Context manager around a module's step or hook that reports errors caused by the strategy in one line.

    Args:
        steps: the number of steps that this process has made before.

    Raises:
        Refused: the strategy has caused an error.
    """
    try:
        yield
    except Exception as error:
        if (line := _refused(error, trainer, steps)) is not None:
            raise line from error
        raise


def refusing_in_evaluation(trainer: Trainer) -> AbstractContextManager[None]:
    """Return the same context for an evaluation step; the first batches of an evaluation count as its first steps."""
    loop: Any = trainer._active_loop
    return refusing(trainer, loop.batch_progress.current.ready - 1)


def _refused(error: Exception, trainer: Trainer, steps: int) -> Refused | None:
    """Return the refusal for an error of a step; None if the strategy is not the cause.

    The strategy is not the cause if it keeps parameters whole, after the first steps, if the error tells of another
    rank or of the device, or if code outside of torch, DeepSpeed and Lightning raises it by a `raise` statement. A
    `training_step` that returns None in automatic optimization is refused in any case.
    """
    name = first_name(trainer.lightning_module)
    if _SKIPPED in str(error) and isinstance(error, RuntimeError | MisconfigurationException):
        return _told(
            error,
            f"{name}.training_step returns None in automatic optimization, but all devices have to train on each "
            "batch; return a loss (to skip a batch, 0 times its loss), or set self.automatic_optimization = False if "
            "it steps manually",
        )
    if _is_of_reentrant_checkpoint(error) and trainer.world_size > 1:
        is_ddp = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
        return _told(
            error,
            f"the backward pass of {name} computes gradients several times, as reentrant checkpoints do, and "
            f"{type(trainer.strategy).__name__} expects each once; call torch.utils.checkpoint.checkpoint with "
            "use_reentrant=False" + (", or type trainer.strategy.static_graph=true" if is_ddp else ""),
        )
    is_whole = isinstance(trainer.strategy, SingleDeviceStrategy) or (
        isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
    )
    if is_whole or steps >= STEPS or not isinstance(error, _KINDS) or isinstance(error, _OTHERS):
        return None
    if is_of_another_rank_or_device(error):  # a killed rank must not be told as what a strategy can't do
        return None
    frame = raised_in(error)
    if frame is not None and _package(frame.f_globals.get("__name__")) not in _LIBRARIES:
        return None
    message = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
    gathers_parts = getattr(trainer.strategy, "gather", None) == "parts"  # of fsdp
    return _told(
        error,
        f"{name} fails in its first steps under {type(trainer.strategy).__name__}, which shards parameters over "
        f"devices{_place(error)}: {message}; {'type trainer.strategy.gather=step, or ' if gathers_parts else ''}"
        "use strategy=ddp, which does not shard them. If it also fails there, the "
        "error is in the module. The traceback is in train.log",
    )


def _is_of_reentrant_checkpoint(error: Exception) -> bool:
    """Return whether a backward pass within another has failed, which `use_reentrant=True` starts for each block."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames}
    return _READY_TWICE in str(error) or (
        isinstance(error, RuntimeError | AssertionError)
        and ("torch.utils.checkpoint", "backward") in places
        and _package(frames[-1].f_globals.get("__name__")) in _LIBRARIES
        and not is_of_another_rank_or_device(error)
        and not isinstance(error, _OTHERS)
    )


def _told(error: Exception, line: str) -> Refused:
    refusal = Refused(line)
    refusal.details = "".join(traceback.format_exception(error))
    return refusal


def _place(error: Exception) -> str:
    """Return the function and line of the innermost frame outside of libraries, as text."""
    frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [at for at in frames if _package(at[0].f_globals.get("__name__")) not in (*_LIBRARIES, "lightswitch")]
    if not own:
        return ""
    frame, number = own[-1]
    return f", in {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]}:{number})"


def _package(module: object) -> str:
    return str(module).partition(".")[0]
