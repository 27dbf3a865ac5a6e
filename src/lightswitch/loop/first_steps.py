"""The first steps under a strategy: one-line messages for errors that the strategy causes, and a step that is rerun."""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightswitch.batches.generators import generator_states, restore_generators
from lightswitch.errors import NeedsValues, Refused
from lightswitch.failures.classify import is_of_another_rank_or_device, raised_in
from lightswitch.strategies.replicas import broadcast_in_place
from lightswitch.strategies.sharded import first_name
from lightswitch.strategies.writes import CarriesWrites

log = logging.getLogger(__name__)


STEPS = 3  # number of a process's steps that count as its first
_KINDS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
_OTHERS = (torch.OutOfMemoryError, torch.distributed.DistError, NeedsValues)  # reported with messages of their own
_SKIPPED = "by returning"  # in Lightning's errors about a step that returns None
_READY_TWICE = "Expected to mark a variable ready only once"  # in torch's error about a gradient
_LIBRARIES = ("torch", "deepspeed", "lightning")

Arguments = OrderedDict[str, Any]  # of `training_step`
Output = TypeVar("Output")
_COPIED = (Tensor, list, int, float, type(None))  # types of a metric's attributes that a step may change


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
    return _told(
        error,
        f"{name} fails in its first steps under {type(trainer.strategy).__name__}, which shards parameters over "
        f"devices{_place(error)}: {message}; use strategy=ddp, which does not shard them. If it also fails there, the "
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


def output_of(step: Callable[[Arguments], Output], arguments: Arguments, trainer: Trainer) -> Output:
    """Return the output of a training step, rerun if it has set weights from each rank's share of the batch.

    The rerun begins with rank 0's weights and buffers.

    Args:
        step: the step in automatic optimization, without its backward pass.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or not isinstance(strategy, CarriesWrites) or not strategy.looks.is_before_first:
        return step(arguments)
    before = _Before.of(trainer, arguments)
    output = step(arguments)
    if not strategy.looks.are_set_from_shares:
        return output
    del output  # and its autograd graph
    if trainer.is_global_zero:
        log.info("weights    the step is repeated with these")
    strategy.looks.forget_step()
    strategy.forget_forward()
    buffers = list(trainer.lightning_module.buffers())
    broadcast_in_place(buffers)
    of_first = [buffer.clone() for buffer in buffers] if trainer.is_global_zero else []
    before.restore(trainer)
    output = step(before.arguments)
    for buffer, value in zip(trainer.lightning_module.buffers(), of_first, strict=False):
        buffer.data.copy_(value)  # so that rank 0's buffers include its share only once
    return output


@dataclass(frozen=True)
class _Before:
    """Snapshot of the state that a forward pass changes, apart from weights and buffers.

    Attributes:
        arguments: arguments of the step, in copied containers with the same tensors.
        generators: states of random generators.
        logged: states of the results that steps have logged so far, by Lightning's key.
        metrics: states of the module's metrics.
    """

    arguments: Arguments
    generators: Any
    logged: Mapping[str, dict[str, Any]]
    metrics: Mapping[Metric, dict[str, Any]]

    @classmethod
    def of(cls, trainer: Trainer, arguments: Arguments) -> _Before:
        """Return a snapshot of the current state."""
        copied = OrderedDict((name, apply_to_collection(value, Tensor, _same)) for name, value in arguments.items())
        results, of_module = _results(trainer), _metrics(trainer)
        return cls(
            copied,
            generator_states(trainer.strategy.root_device),
            {key: _state(item) for key, item in results.items()},
            {metric: _state(metric) for metric in of_module},
        )

    def restore(self, trainer: Trainer) -> None:
        """Restore all but the arguments."""
        restore_generators(self.generators, trainer.strategy.root_device)
        results = _results(trainer)
        for key in results.keys() - self.logged.keys():
            del results[key]
        for metric, state in (*((results[key], state) for key, state in self.logged.items()), *self.metrics.items()):
            vars(metric).update(state)


def _results(trainer: Trainer) -> _ResultCollection:
    return trainer.fit_loop.epoch_loop._results


def _metrics(trainer: Trainer) -> Iterable[Metric]:
    return (part for part in trainer.lightning_module.modules() if isinstance(part, Metric))


def _state(metric: Metric) -> dict[str, Any]:
    return {name: _copy(value) for name, value in vars(metric).items() if isinstance(value, _COPIED)}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value


def _same(tensor: Tensor) -> Tensor:
    return tensor
