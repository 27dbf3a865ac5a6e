"""The precision of a run under DeepSpeed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import nn
from torch.optim import Optimizer

from lightswitch.errors import Refused


class ZeroPrecision(DeepSpeedPrecision):
    """Precision that leaves inputs as they are where weights are in 32 bits and DeepSpeed casts each operation."""

    autocasts = False
    steps_by_hand = False  # as the module optimizes

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Leave it to DeepSpeed's engine, which clips by the Trainer's value in each step of its own.

        Raises:
            Refused: a module that optimizes by hand clips by itself what it does not see.
        """
        if self.steps_by_hand:
            raise Refused(
                "training_step clips gradients (self.clip_gradients), which DeepSpeed keeps to itself; use "
                "strategy=ddp or fsdp"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it is, in 32 bits.

        Lightning would cast its buffers as well, and make complex ones real.
        """
        return super().convert_module(module) if self.precision in ("16-true", "bf16-true") else module

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts else super().convert_input(data)
