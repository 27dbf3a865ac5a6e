"""What ranks log of an epoch or an evaluation, brought together where it ends: the same at any world size.

Each rank sees its share of the samples. Lightning does so for ``sync_dist=True`` alone, by a collective for each name
in the order in which a rank has logged them: where one rank logs what another does not, as for classes that it has
seen, they wait for one another for ever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from lightswitch import patches
from lightswitch.monitoring.step_results import Logged, joined, logged


class LogsOfRanks:
    """Values that the ranks of a Trainer log, brought together at the moments that all of them reach.

    These are the end of an epoch's or an evaluation's last batch, before hooks are called, and the end of those hooks.

    Args:
        share: of the ranks that read other samples than those before them: ranks of tensor parallelism read the same.
    """

    def __init__(self, trainer: Trainer, share: float) -> None:
        self._trainer = trainer
        self._share = share
        self._joined: dict[str, Tensor] = {}  # by Lightning's key, the value of all ranks, until another is logged

    def install(self) -> None:
        """Bring together from now on."""
        connector = self._trainer._logger_connector
        reach_end, end = connector.epoch_end_reached, connector.on_epoch_end

        def reached() -> None:
            reach_end()
            self._join()

        def ended() -> None:
            self._join()
            end()

        patches.replace(connector, "epoch_end_reached", reached)
        patches.replace(connector, "on_epoch_end", ended)

    def remove(self) -> None:
        """Leave what is logged to Lightning again."""
        patches.restore(self._trainer._logger_connector, "epoch_end_reached")
        patches.restore(self._trainer._logger_connector, "on_epoch_end")

    def _join(self) -> None:
        """Give each rank the values of all ranks, also of what it has not logged itself. Collective."""
        results = self._trainer._results
        assert results is not None
        own = {
            key: item
            for key, item in logged(results).items()
            if not _is_left_to_lightning(item) and self._joined.get(key) is not item.value
        }
        of_ranks: list[dict[str, Logged]] = [{} for _ in range(self._trainer.world_size)]
        dist.all_gather_object(of_ranks, {key: Logged.of(item) for key, item in own.items()})
        for key, whole in joined(of_ranks).items():
            if key not in own:
                whole.log_name(results, self._trainer.strategy)
            item = results[key]
            item.reset()
            results.update_metrics(key, *_update(whole, item.value, self._share))
            self._joined[key] = item.value


def _is_left_to_lightning(item: _ResultMetric) -> bool:
    """Return whether the user has asked Lightning to bring a value together, or for that of rank 0 alone."""
    return bool(item.meta.sync.should or item.meta.sync.rank_zero_only)


def _update(whole: Logged, like: Tensor, share: float) -> tuple[Tensor, float]:
    """Return the value and the batch size that leave an empty item of Lightning's with what all ranks have logged."""
    value = whole.value
    if whole.reduce_fx == "mean":
        value = value / whole.samples if whole.samples else float("nan")
    elif whole.reduce_fx == "sum":
        value *= share
    return torch.tensor(value, dtype=like.dtype, device=like.device), whole.samples
