"""The precision of a run under DeepSpeed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import nn


class ZeroPrecision(DeepSpeedPrecision):
    """Precision that leaves inputs as they are where weights are in 32 bits and DeepSpeed casts each operation."""

    autocasts = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it is, in 32 bits.

        Lightning would cast its buffers as well, and make complex ones real.
        """
        return super().convert_module(module) if self.precision in ("16-true", "bf16-true") else module

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts else super().convert_input(data)
