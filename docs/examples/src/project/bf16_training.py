"""bfloat16 in training alone."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins import Precision


class BF16Training(Precision):
    """Computes training steps under autocast in bfloat16, and validation, test and prediction in 32 bits.

    Args:
        device: cuda or cpu.
    """

    precision = "bf16-mixed"  # what reports call it

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def train_step_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16)
