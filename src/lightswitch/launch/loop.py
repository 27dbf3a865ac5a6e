"""Lightning's loop over batches, with what it would find out anew in each one kept where nothing has changed."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightswitch import patches


def shorten_loop(trainer: Trainer) -> None:
    """Give a Trainer a loop over batches with less overhead; hooks, their order and their arguments stay."""
    given = trainer.fit_loop.epoch_loop
    patches.replace(trainer.fit_loop, "epoch_loop", EpochLoop(trainer, given.min_steps, given.max_steps))


class EpochLoop(_TrainingEpochLoop):
    """Loop over the batches of an epoch, which inspects hooks once and reads what was logged once."""

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._results = Results(training=True)
        self.automatic_optimization = Optimization(trainer)
        self._step: Callable[..., Any] | None = None
        self._takes_index = False

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        hooks = self.trainer._data_connector._datahook_selector
        assert hooks is not None
        find = functools.partial(_DataHookSelector.get_instance, hooks)  # whether model or data have a batch's hook
        patches.replace(hooks, "get_instance", functools.cache(find))

    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        step = self.trainer.lightning_module.training_step
        if step != self._step:
            self._step, self._takes_index = step, is_param_in_hook_signature(step, "batch_idx", min_args=2)
        kwargs["batch"] = batch
        if self._takes_index:
            kwargs["batch_idx"] = batch_idx
        return kwargs


class Results(_ResultCollection):
    """Results whose values of a step are read once: on a GPU, each reading of one for a progress bar waits."""

    _of_step: _METRICS | None = None

    def metrics(self, on_step: bool) -> _METRICS:
        if not on_step:
            return super().metrics(on_step)
        if self._of_step is None:
            self._of_step = super().metrics(on_step)
        kept = self._of_step
        return _METRICS(callback=dict(kept["callback"]), log=dict(kept["log"]), pbar=dict(kept["pbar"]))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self._of_step = None
        super().update_metrics(key, value, batch_size)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        self._of_step = None
        super().reset(metrics, fx)

    def to(self, *args: Any, **kwargs: Any) -> Results:
        self._of_step = None
        super().to(*args, **kwargs)
        return self


class StepOutput(ClosureResult):
    """Output of a training step, whose loss is divided by the accumulation only where that is not 1."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if normalize == 1 and isinstance(training_step_output, Tensor):
            return cls(training_step_output)
        return super().from_training_step_output(training_step_output, normalize)


class Optimization(_AutomaticOptimization):
    """Lightning's loop over a batch's optimizer, whose steps have this output."""

    output_result_cls = StepOutput
