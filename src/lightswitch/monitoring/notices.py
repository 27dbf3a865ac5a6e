"""A callback that logs notices about a run: the model's size, what its curve depends on, and steps that don't count."""

from __future__ import annotations

import logging
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from lightswitch.errors import listed
from lightswitch.hooked_strategy import HookedStrategy

log = logging.getLogger(__name__)


class Notices(Callback):
    """Callback that logs the model's number of parameters, before a strategy shards the model, and other notices.

    It leaves calling `configure_model` to Lightning: a second call may read weights, or form a process group that the
    other ranks do not join.

    Attributes:
        counts: numbers of parameters, empty until they are known.
    """

    def __init__(self) -> None:
        self._is_logged = False
        self._first_step: int | None = None  # None once the first epoch is over
        self.counts: dict[str, int] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._is_logged and trainer.is_global_zero:
            self._is_logged = True
            HookedStrategy.of(trainer).when_built(partial(self._log_size, trainer, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn after the first epoch if Lightning has counted no step: checkpoints and limits depend on the number."""
        first, self._first_step = self._first_step, None
        if first == trainer.global_step and trainer.is_global_zero:
            log.warning(
                "no step    in an epoch of %d batches, no optimizer step was counted, so nothing is saved and "
                "trainer.max_steps is never reached: call step() of what self.optimizers() returns, not of an "
                "optimizer inside it, and return a loss from training_step",
                trainer.fit_loop.batch_idx + 1,
            )

    def _log_size(self, trainer: Trainer, model: LightningModule) -> None:
        parameters = list(filter(lambda one: not is_lazy(one), model.parameters()))  # a strategy refuses the others
        count = sum(parameter.numel() for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        self.counts = {"parameters": count, "trained_parameters": trained}
        log.info("model      %s, %.2f M parameters", type(model).__name__, count / 1e6)
        if trainer.state.fn == TrainerFn.FITTING:
            _log_draws_and_statistics(trainer, model)


def _log_draws_and_statistics(trainer: Trainer, model: LightningModule) -> None:
    """Log if dropout or batch norms make the curve depend on the number of devices or micro-batches."""
    dropouts = [name for name, part in model.named_modules() if isinstance(part, _DropoutNd) and part.p]
    if dropouts and trainer.world_size * trainer.accumulate_grad_batches > 1:
        log.info(
            "dropout    %s: each micro batch draws its own random numbers, so the training curve depends on the number "
            "of micro batches, as it does on the seed",
            listed(dropouts),
        )
    norms = [
        name
        for name, part in model.named_modules()
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)  # subclasses, such as timm's, too
    ]
    if norms and trainer.world_size > 1 and getattr(trainer.strategy, "_layer_sync", None) is None:
        on_gpus = trainer.strategy.root_device.type != "cpu"
        fix = "; trainer.sync_batchnorm=true computes them over all devices" if on_gpus else ""
        depends = f"the number of devices{fix}"
    elif norms and trainer.accumulate_grad_batches > 1:
        depends = "micro_batch_size; leave that out if the memory allows it"
    else:
        return
    log.warning(
        "batch norm %s: its statistics are computed over one micro batch of a device, so the training curve depends "
        "on %s",
        listed(norms),
        depends,
    )
