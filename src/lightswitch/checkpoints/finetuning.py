"""Layers that Lightning's BaseFinetuning unfreezes while a run goes on."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from lightswitch.batches.position import Position


def unfreeze_again(trainer: Trainer, position: Position) -> None:
    """Go once more through the epochs that a resumed run has begun, as far as they unfreeze layers.

    What that does to modules and optimizers no checkpoint holds, and Lightning restores a part of it only, before it
    has read the callback's state where a strategy is set up first.
    """
    begun = position.epoch + (position.step > 0)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set past Lightning's declaration
        if isinstance(callback, BaseFinetuning):
            state = callback.state_dict()
            for epoch in range(begun):
                for optimizer in trainer.optimizers:
                    callback.finetune_function(trainer.lightning_module, epoch, optimizer)
            callback.load_state_dict(state)
