"""The first forward pass made once more, where it has set weights from each rank's share of the batch.

Codebooks and ActNorm take their first values from the batch. One process that takes the same micro batches sets them
from the first one, which is rank 0's share, and computes with them from there on: so do all ranks, in a second forward
pass, whose loss and gradients are those of the weights that they share. Nothing remains of the first but these weights
and rank 0's buffers, which know that they are set.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightswitch.batches.randomness import generator_states, restore_generators
from lightswitch.strategies.rank_0 import broadcast_in_place
from lightswitch.strategies.writes import CarriesWrites

log = logging.getLogger(__name__)

Arguments = OrderedDict[str, Any]  # of `training_step`
Output = TypeVar("Output")
_COPIED = (Tensor, list, int, float, type(None))  # attributes of a metric that a step may change


def output_of(step: Callable[[Arguments], Output], arguments: Arguments, trainer: Trainer) -> Output:
    """Return the output of a training step, which is made again if it has set weights from shares of the batch.

    Args:
        step: in automatic optimization, without its backward pass.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or not isinstance(strategy, CarriesWrites) or not strategy.looks.is_before_first:
        return step(arguments)
    before = _Before.of(trainer, arguments)
    output = step(arguments)
    if not strategy.looks.are_set_from_shares:
        return output
    del output  # and its graph
    if trainer.is_global_zero:
        log.info("weights    the step is made again with these")
    strategy.looks.forget_step()
    strategy.forget_forward()
    buffers = list(trainer.lightning_module.buffers())
    broadcast_in_place(buffers)
    of_first = [buffer.clone() for buffer in buffers] if trainer.is_global_zero else []
    before.restore(trainer)
    output = step(before.arguments)
    for buffer, value in zip(trainer.lightning_module.buffers(), of_first, strict=False):
        buffer.data.copy_(value)  # that of rank 0 has seen its share once
    return output


@dataclass(frozen=True)
class _Before:
    """Snapshot of what a forward pass changes beside weights and buffers.

    Attributes:
        arguments: of the step, in containers of their own.
        generators: states of random generators.
        logged: what steps have logged so far, by Lightning's key.
        metrics: of the module.
    """

    arguments: Arguments
    generators: Any
    logged: Mapping[str, dict[str, Any]]
    metrics: Mapping[Metric, dict[str, Any]]

    @classmethod
    def of(cls, trainer: Trainer, arguments: Arguments) -> _Before:
        """Return what is now."""
        copied = OrderedDict((name, apply_to_collection(value, Tensor, _same)) for name, value in arguments.items())
        results, of_module = _results(trainer), _metrics(trainer)
        return cls(
            copied,
            generator_states(trainer.strategy.root_device),
            {key: _state(item) for key, item in results.items()},
            {metric: _state(metric) for metric in of_module},
        )

    def restore(self, trainer: Trainer) -> None:
        """Put it back, but for the arguments."""
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
