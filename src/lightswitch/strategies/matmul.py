"""How exactly products of 32-bit matrices are computed, where a device has a faster way."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

_WITH_TF32 = (8, 0)  # compute capability of Ampere


class MatmulPrecision(Callback):
    """Callback that sets the precision of 32-bit matrix products in each process, and says what another would gain.

    Args:
        precision: highest, 32 bits; high, TensorFloat-32, whose fraction has 10 bits in place of 23; medium, bfloat16.
    """

    def __init__(self, precision: Literal["highest", "high", "medium"]) -> None:
        self.precision = precision
        self._is_told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.set_float32_matmul_precision(self.precision)
        if trainer.is_global_zero and not self._is_told:
            self._is_told = True
            if self.precision == "highest" and _gains(trainer):
                log.info("products   of matrices in 32 bits; matmul_precision=high takes TF32, several times as fast")


def _gains(trainer: Trainer) -> bool:
    """Return whether a run computes in 32 bits on a GPU with tensor cores for TF32."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or torch.version.hip is not None or str(trainer.precision) != "32-true":
        return False
    return torch.cuda.get_device_capability(device) >= _WITH_TF32
