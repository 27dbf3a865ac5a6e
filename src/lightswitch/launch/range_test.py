"""A range test of learning rates (Smith 2017, arXiv:1506.01186): a few steps at rates that rise, and undone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.batches.callback import GlobalBatch
from lightswitch.launch.loop import EpochLoop
from lightswitch.strategies.sharded import Reversible

_SMOOTHING = 0.98  # Lightning's share of the losses before in the smoothed loss


class RangeTest(Callback):
    """Callback that takes a step at each of some rates, and keeps the loss of the global batch, smoothed as Lightning
    does.

    The steps are those that the run begins with: the same samples in the same order at any world size. They have a loop
    and a position of their own, so that those of the run stay as they are.

    Args:
        batch: how the run cuts its batches.
        rates: of the largest of the optimizer's groups; the others keep their share of it.
        divergence: ends the test, as the smoothed loss over the smallest so far; None for no end but the last rate.
    """

    def __init__(self, batch: GlobalBatch, rates: Sequence[float], divergence: float | None) -> None:
        self.losses: list[float] = []
        self._batch = GlobalBatch(batch.plan, batch.seed, batch.shares_streams)
        self._rates = rates
        self._divergence = divergence
        self._shares: list[float] = []
        self._mean = 0.0
        self._best = math.inf

    def run(self, trainer: Trainer, pl_module: LightningModule, run_batch: GlobalBatch, others: list[Callback]) -> None:
        """Take the steps, and restore weights, buffers and loss scale; the optimizer has to be made anew.

        Args:
            run_batch: the run's own, which lets go of the strategy meanwhile.
            others: callbacks that are called beside it.
        """
        rates = initial_rates(trainer)
        self._shares = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
        loop = _loop(trainer, len(self._rates))
        with ExitStack() as undone:
            undone.enter_context(isolate_rng())
            undone.enter_context(_restored(trainer, pl_module))
            undone.enter_context(_replaced(trainer.strategy, lr_scheduler_configs=[]))
            undone.enter_context(
                _replaced(
                    trainer,
                    callbacks=[*others, self._batch, self],
                    fit_loop=loop,
                    limit_val_batches=0,
                    log_every_n_steps=1,
                    val_check_batch=trainer.val_check_batch,
                )
            )
            undone.enter_context(_silent(trainer))
            undone.enter_context(_imposed(self._batch, run_batch, trainer, pl_module))
            loop.run()
            loop.teardown()
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rate = self._rates[trainer.global_step]
        for group, share in zip(trainer.optimizers[0].param_groups, self._shares, strict=True):
            group["lr"] = rate * share

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        steps = trainer.global_step
        if steps == len(self.losses):  # in the middle of a step
            return
        loss = self._batch.step_loss
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * (math.nan if loss is None else float(loss))
        smoothed = self._mean / (1 - _SMOOTHING ** (steps + 1))
        self.losses.append(smoothed)
        diverges = steps > 1 and self._divergence is not None and smoothed > self._divergence * self._best
        if diverges or not math.isfinite(smoothed):
            trainer.should_stop = True
        self._best = smoothed if steps == 1 else min(self._best, smoothed)


def initial_rates(trainer: Trainer) -> list[float]:
    """Return the learning rate of each of the optimizer's groups before a schedule has changed it."""
    groups = trainer.optimizers[0].param_groups
    return [float(group.get("initial_lr", group["lr"])) for group in groups]


def _loop(trainer: Trainer, steps: int) -> _FitLoop:
    """Return a loop over the run's training data that ends after so many steps."""
    loop = _FitLoop(trainer, min_epochs=0, max_epochs=-1)
    patches.replace(loop, "epoch_loop", EpochLoop(trainer, None, steps))
    patches.replace(loop, "_data_source", trainer.fit_loop._data_source)
    return loop


@contextmanager
def _replaced(target: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            patches.replace(target, name, value)
        yield
    finally:
        for name, value in before.items():
            patches.replace(target, name, value)


@contextmanager
def _silent(trainer: Trainer) -> Iterator[None]:
    loggers, trainer.loggers = trainer.loggers, []
    try:
        yield
    finally:
        trainer.loggers, trainer.should_stop = loggers, False


@contextmanager
def _imposed(own: GlobalBatch, other: GlobalBatch, trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Context in which one callback's order of samples holds in place of another's."""
    other.teardown(trainer, module, "fit")
    own.setup(trainer, module, "fit")
    try:
        yield
    finally:
        own.teardown(trainer, module, "fit")
        other.setup(trainer, module, "fit")


@contextmanager
def _restored(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Context that leaves a module and the precision's loss scale as they were; each rank copies what it holds."""
    precision, strategy = trainer.precision_plugin, trainer.strategy
    scale = precision.state_dict()
    kept = {name: tensor.to("cpu", copy=True) for name, tensor in _held(module) if tensor.numel()}
    try:
        with strategy.restored() if isinstance(strategy, Reversible) else nullcontext():
            yield
    finally:
        module.zero_grad()
        for name, tensor in _held(module):
            if name in kept:  # else the strategy holds it elsewhere
                tensor.copy_(kept[name])
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
        if scale:
            precision.load_state_dict(scale)


def _held(module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that this process holds of each parameter and buffer."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        value = tensor.detach()
        yield name, value.to_local() if isinstance(value, DTensor) else value
