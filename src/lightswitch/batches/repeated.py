"""Evaluation sets of fewer samples than ranks: a rank without a sample reads another's, which counts for nothing.

Forward passes of sharded strategies are collective, so that every rank makes one.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.batches.order import EvaluationSlices
from lightswitch.batches.sampling import unwrapped


class RepeatedSamples:
    """Undoer of what a batch of a repeated sample changes in logged values and metrics, once its hooks have run.

    What a module collects by itself, as in a list, keeps it.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._metrics: dict[Metric, dict[str, Any]] | None = None  # their states before the batch
        self._logged: dict[str, _ResultMetric] = {}

    def install(self) -> None:
        """Undo from now on."""
        connector = self._trainer._logger_connector
        end = connector.on_batch_end

        def ended() -> None:
            end()
            self._undo()

        patches.replace(connector, "on_batch_end", ended)

    def remove(self) -> None:
        """Let batches count again."""
        patches.restore(self._trainer._logger_connector, "on_batch_end")

    def begin(self, dataloader_idx: int) -> None:
        """Note what there is before a batch of an evaluation, if it repeats a sample."""
        if not is_repeated(self._trainer._evaluation_loop._combined_loader, dataloader_idx):
            return
        metrics = (module for module in self._module.modules() if isinstance(module, Metric))
        self._metrics = {metric: metric._copy_state_dict() for metric in metrics}
        self._logged = {key: copy.copy(item) for key, item in self._results.items() if item.is_tensor}

    @property
    def _results(self) -> _ResultCollection:
        results = self._trainer._results
        assert results is not None
        return results

    def _undo(self) -> None:
        if self._metrics is None:
            return
        for metric, states in self._metrics.items():
            for name, before in states.items():
                setattr(metric, name, _without(getattr(metric, name), before))
        for key, item in self._results.items():
            if item.is_tensor and not item.has_reset:
                _set_back(item, self._logged.get(key))
        self._metrics = None


def is_repeated(loaders: Any, dataloader_idx: int) -> bool:
    """Return whether this rank has no sample of its own of one of an evaluation's loaders."""
    slices = unwrapped(getattr(loaders.flattened[dataloader_idx], "batch_sampler", None))
    return isinstance(slices, EvaluationSlices) and slices.is_repeated


def _without(state: Any, before: Any) -> Any:
    """Return a metric's state without what was added to it: rows that are kept leave none, of their shape."""
    if not isinstance(state, list):
        return before
    return [*before, *(rows[:0] for rows in state[len(before) :] if isinstance(rows, Tensor) and rows.ndim)]


def _set_back(item: _ResultMetric, before: _ResultMetric | None) -> None:
    """Let a logged value be what it was; one that is new, or was of an earlier evaluation, is of no sample."""
    if before is not None and not before.has_reset:
        vars(item).update(vars(before))
    else:
        Metric.reset(item)  # past Lightning's, which would take it for one that was never logged
