"""Strategies for a planned step, whose tensors have no values and whose other ranks do not exist."""

from __future__ import annotations

from typing import TypeVar

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from lightswitch.mixins import Mixin, with_mixin
from lightswitch.planning.fake_ddp import FakeDDP

T = TypeVar("T")


def alone(strategy: Strategy) -> Strategy:
    """Return a strategy that neither moves fake tensors nor waits for other ranks."""
    has_reducer = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    return with_mixin(_AloneInDDP if has_reducer else _Alone, strategy)


class _Alone(Mixin, Strategy):
    def model_to_device(self) -> None:
        """Do nothing: fake tensors are made where they are to be."""

    def teardown(self) -> None:
        """Do nothing: it would move the model."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj


class _AloneInDDP(_Alone, DDPStrategy):
    def _setup_model(self, model: nn.Module) -> FakeDDP:
        """Return a stand-in for DistributedDataParallel, whose reducer waits."""
        options = self._ddp_kwargs
        sent = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(getattr(self, "comm_hook", None) or "")
        return FakeDDP(
            model,
            2**20 * (options.get("bucket_cap_mb") or 25),
            bool(options.get("gradient_as_bucket_view")),
            sent,
        )

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: Lightning would prepare the reducer for a module that optimizes by hand."""


class Converted(Mixin, Precision):
    """Precision whose module is converted already, as torch can't with fake tensors."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module
