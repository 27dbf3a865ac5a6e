"""Corrections that make metrics the same at any world size, installed on a strategy and a module from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric


def exact_mean(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `Strategy.reduce` so that means of whole numbers are taken in double precision.

    Lightning weights synchronised metrics by a mean of int64 batch sizes, which truncates where ranks differ:
    37 samples over 2 ranks gave .777 for .756.
    """

    @functools.wraps(reduce)
    def exact(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            reduced = reduce(tensor.double(), *args, **kwargs)
            is_sum = str(kwargs.get("reduce_op", args[1] if len(args) > 1 else "mean")).lower().endswith("sum")
            return reduced.to(tensor.dtype) if is_sum else reduced
        return reduce(tensor, *args, **kwargs)

    return exact


def synced_in_evaluation(trainer: Trainer, log: Callable[..., None]) -> Callable[..., None]:
    """Wrap a `LightningModule.log` so that it sets ``sync_dist=True`` outside of training, where a rank sees its
    share."""

    @functools.wraps(log)
    def synced(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        rank_zero_only = kwargs.get("rank_zero_only", False)
        if not trainer.training and not isinstance(value, Metric) and not rank_zero_only and len(args) < 7:
            kwargs["sync_dist"] = True
        log(name, value, *args, **kwargs)

    return synced
