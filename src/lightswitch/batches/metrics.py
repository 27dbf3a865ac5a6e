"""A correction that makes metrics the same at any world size, installed on a module from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from torchmetrics import Metric


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
