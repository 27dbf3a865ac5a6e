"""Callbacks that log notices about the model, and about how steps are counted."""

from __future__ import annotations

import logging
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from lightswitch import patches
from lightswitch.errors import listed

log = logging.getLogger(__name__)


class ModelSize(Callback):
    """Callback that logs the model's number of parameters once on rank 0, before a strategy shards the model.

    It also logs if batch norms or dropout make the training curve depend on the number of devices or micro-batches.

    It leaves calling `configure_model` to Lightning: a second call may read weights, or form a process group that the
    other ranks do not join.
    """

    def __init__(self) -> None:
        self._is_logged = False
        self.counts: dict[str, int] = {}  # numbers of parameters, empty until they are known

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._is_logged or not trainer.is_global_zero:
            return
        self._is_logged = True
        patches.call_when_built(pl_module, partial(self._log_size, trainer, pl_module))

    def _log_size(self, trainer: Trainer, model: LightningModule) -> None:
        known = filter(lambda parameter: not is_lazy(parameter), model.parameters())  # a strategy refuses the others
        parameters = list(known)
        count = sum(parameter.numel() for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        self.counts = {"parameters": count, "trained_parameters": trained}
        log.info("model      %s, %.2f M parameters", type(model).__name__, count / 1e6)
        if trainer.state.fn == TrainerFn.FITTING:
            _log_draws_and_statistics(trainer, model)


def _log_draws_and_statistics(trainer: Trainer, model: LightningModule) -> None:
    dropouts = [name for name, part in model.named_modules() if isinstance(part, _DropoutNd) and part.p]
    if dropouts and trainer.world_size * trainer.accumulate_grad_batches > 1:
        message = (
            "dropout    %s: each micro batch draws its own random numbers, so the training curve depends on the number "
            "of micro batches, as it does on the seed"
        )
        log.info(message, listed(dropouts))
    norms = [name for name, part in model.named_modules() if _is_batch_norm(part)]
    message = (
        "batch norm %s: its statistics are computed over one micro batch of a device, so the training curve depends "
        "on %s"
    )
    if norms and trainer.world_size > 1 and getattr(trainer.strategy, "_layer_sync", None) is None:
        on_gpus = trainer.strategy.root_device.type != "cpu"
        log.warning(
            message,
            listed(norms),
            "the number of devices"
            + ("; trainer.sync_batchnorm=true computes them over all devices" if on_gpus else ""),
        )
    elif norms and trainer.accumulate_grad_batches > 1:
        log.warning(message, listed(norms), "micro_batch_size; leave that out if the memory allows it")


def _is_batch_norm(part: nn.Module) -> bool:
    """Return whether a module, for example a subclass of timm's, computes statistics over the samples of a device."""
    return isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)


class StepsByHand(Callback):
    """Callback that logs which settings count batches and which optimizer steps, under manual optimization."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization or not trainer.is_global_zero:
            return
        optimizers = f"{len(trainer.optimizers)} optimizer{'s' if len(trainer.optimizers) != 1 else ''}"
        log.info(
            "manual     %s uses manual optimization, with %s: trainer.max_steps and step_N.ckpt count the steps of "
            "all; trainer.val_check_interval, trainer.log_every_n_steps and metrics.csv count batches",
            type(pl_module).__name__, optimizers,
        )  # fmt: skip


class StepsAreCounted(Callback):
    """Callback that warns after the first epoch if Lightning has counted no optimizer step.

    Checkpoints, schedules and the limits of a run depend on the number of optimizer steps.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None  # None once the first epoch is over

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first, self._first_step = self._first_step, None
        if first != trainer.global_step or not trainer.is_global_zero:
            return
        log.warning(
            "no step    in an epoch of %d batches, no optimizer step was counted, so nothing is saved and "
            "trainer.max_steps is never reached: call step() of what self.optimizers() returns, not of an optimizer "
            "inside it, and return a loss from training_step",
            trainer.fit_loop.batch_idx + 1,
        )
