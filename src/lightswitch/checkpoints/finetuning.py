"""Frozen layers: unfreezing during training and after a resume, and checkpoints without frozen weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.batches.plan import Position
from lightswitch.checkpoints import names
from lightswitch.checkpoints.last import FROZEN_SINCE
from lightswitch.hooked_strategy import callbacks_of


def follow_strategy(callbacks: Iterable[Callback]) -> None:
    """Patch BaseFinetuning so that it unfreezes layers of sharded modules."""
    if any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        patches.replace(BaseFinetuning, "filter_on_optimizer", staticmethod(_absent))


def _absent(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    present = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if parameter not in present]


def unfreeze_again(trainer: Trainer, position: Position) -> None:
    """Unfreeze the layers that were unfrozen in the epochs before a resume.

    No checkpoint holds the callback's changes to modules and optimizers. Lightning restores only some of them and, if
    the strategy is set up first, does so before it has read the callback's state.
    """
    begun = position.epoch + (position.step > 0)
    for callback in callbacks_of(trainer):
        if not isinstance(callback, BaseFinetuning):
            continue
        state = callback.state_dict()
        for epoch in range(begun):
            for optimizer in trainer.optimizers:
                callback.finetune_function(trainer.lightning_module, epoch, optimizer)
        callback.load_state_dict(state)


LEFT_OUT = "left_out"  # in a checkpoint's state: names of parameters that the model loads itself


class TrainableOnly(Callback):
    """Callback that omits untrained parameters (`requires_grad=False`) from checkpoints, for example to save only
    adapters.

    The model that reads such a checkpoint has to load these parameters itself, for example from a pretrained model in
    its constructor. A parameter that was not frozen when the run began, even before a resume, is saved.
    """

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        frozen = {name for name, parameter in names.parameters(pl_module).items() if not parameter.requires_grad}
        frozen -= checkpoint.get(FROZEN_SINCE, {}).keys()  # of StepBoundary, which comes before
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = names.without(weights, frozen)
        checkpoint[LEFT_OUT] = sorted(frozen & weights.keys())
