"""Checkpoints without the parameters that a run leaves as they are."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lightswitch.checkpoints import names

KEY = "left_out"  # of a checkpoint's state: names of parameters that the model brings itself


class TrainableOnly(Callback):
    """Callback that leaves out of checkpoints what the run has not trained (`requires_grad=False`), as those of
    adapters alone.

    The model that reads one has to bring it itself, as one does that reads a pretrained model when it is built. A
    parameter that is frozen later, or in a resumed run, is saved.
    """

    def __init__(self) -> None:
        self._frozen: dict[str, nn.Parameter] | None = None  # so far; None before the run trains
        self._trained: set[str] = set()  # before the resume

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if KEY in checkpoint:
            self._trained = names.parameters(pl_module).keys() - set(checkpoint[KEY])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._frozen = names.without(names.parameters(pl_module), self._trained)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert self._frozen is not None
        self._frozen = {name: parameter for name, parameter in self._frozen.items() if not parameter.requires_grad}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        so_far = names.parameters(pl_module) if self._frozen is None else self._frozen
        frozen = {name for name, parameter in so_far.items() if not parameter.requires_grad}
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if name not in frozen}
        checkpoint[KEY] = sorted(frozen & weights.keys())
