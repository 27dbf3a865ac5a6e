"""Checkpoints without the parameters that a run leaves as they are."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch.checkpoints import names

KEY = "left_out"  # of a checkpoint's state: names of parameters that the model brings itself


class TrainableOnly(Callback):
    """Callback that leaves frozen parameters (`requires_grad=False`) out of checkpoints, as those of adapters alone.

    The model that reads one has to bring them itself, as one does that reads a pretrained model when it is built. They
    are those that are frozen when the checkpoint is saved.
    """

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        frozen = {name for name, one in names.parameters(pl_module).items() if not one.requires_grad}
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if name not in frozen}
        checkpoint[KEY] = sorted(frozen & weights.keys())
