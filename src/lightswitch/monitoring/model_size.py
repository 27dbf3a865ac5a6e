"""Class and size of the model that a run trains, and what in it depends on how the batch is cut."""

from __future__ import annotations

import logging
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightswitch import patches
from lightswitch.errors import listed

log = logging.getLogger(__name__)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ModelSize(Callback):
    """Callback that counts the model's parameters on rank 0 and logs them once, before a strategy takes it apart.

    Of batch norms and dropout it says that the curve follows the number of devices and the micro batch.

    `configure_model` is the user's, and is left to Lightning: called once more, it may read weights, or form a process
    group that other ranks know nothing of.
    """

    def __init__(self) -> None:
        self._is_told = False
        self.counts: dict[str, int] = {}  # of parameters, once they are known

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._is_told or not trainer.is_global_zero:
            return
        self._is_told = True
        if is_overridden("configure_model", pl_module):
            patches.call_after(pl_module, "configure_model", partial(self._tell, trainer, pl_module))
        else:
            self._tell(trainer, pl_module)

    def _tell(self, trainer: Trainer, model: LightningModule) -> None:
        count = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.counts = {"parameters": count, "trained_parameters": trained}
        log.info("model      %s, %.2f M parameters", type(model).__name__, count / 1e6)
        if trainer.state.fn == TrainerFn.FITTING:
            _tell_of_draws_and_statistics(trainer, model)


def _tell_of_draws_and_statistics(trainer: Trainer, model: LightningModule) -> None:
    dropouts = [name for name, part in model.named_modules() if isinstance(part, _DropoutNd) and part.p]
    if dropouts and trainer.world_size * trainer.accumulate_grad_batches > 1:
        told = "dropout    %s: each micro batch draws its own, so the curve follows their number, as it follows a seed"
        log.info(told, listed(dropouts))
    norms = [name for name, part in model.named_modules() if type(part) in _BATCH_NORMS]
    told = "batch norm %s: its statistics are those of the samples that a device takes at once, so the curve follows %s"
    if norms and trainer.world_size > 1 and getattr(trainer.strategy, "_layer_sync", None) is None:
        on_gpus = trainer.strategy.root_device.type != "cpu"
        log.warning(
            told,
            listed(norms),
            "the number of devices" + ("; trainer.sync_batchnorm=true takes them over all devices" if on_gpus else ""),
        )
    elif norms and trainer.accumulate_grad_batches > 1:
        log.warning(told, listed(norms), "micro_batch_size; leave that out where the memory allows it")
