"""What a rank has logged of an epoch or an evaluation so far, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True)
class Logged:
    """Value that a rank, or all ranks, have logged under one name in an epoch so far, by `self.log(…, on_epoch=True)`.

    Attributes:
        reduce_fx: mean, sum, min or max.
        value: by ``reduce_fx`` of what was logged; of a mean, the sum over samples.
        samples: that a mean is over.
    """

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    enable_graph: bool
    add_dataloader_idx: bool
    reduce_fx: str
    value: float
    samples: float

    @classmethod
    def of(cls, item: _ResultMetric) -> Logged:
        """Return what Lightning has collected under a name."""
        meta = item.meta
        suffix = "" if meta.dataloader_idx is None else f".{meta.dataloader_idx}"
        return cls(
            fx=meta.fx.removesuffix(suffix),
            name=meta.name,
            prog_bar=meta.prog_bar,
            logger=meta.logger,
            on_step=meta.on_step,
            enable_graph=meta.enable_graph,
            add_dataloader_idx=meta.add_dataloader_idx,
            reduce_fx=meta.reduce_fx.__name__,
            value=item.value.item(),
            samples=item.cumulated_batch_size.item() if meta.is_mean_reduction else 1,
        )

    def joined(self, other: Logged) -> Logged:
        """Return both together."""
        if self.reduce_fx in ("min", "max"):
            return replace(self, value=(min if self.reduce_fx == "min" else max)(self.value, other.value))
        return replace(self, value=self.value + other.value, samples=self.samples + other.samples)

    def log_name(self, results: _ResultCollection, strategy: Strategy) -> None:
        """Log the name without a value, so that Lightning knows of it where it was logged elsewhere."""
        arguments = {key: value for key, value in asdict(self).items() if key not in ("value", "samples", "reduce_fx")}
        results.log(
            value=torch.tensor(_NEUTRAL[self.reduce_fx], device=strategy.root_device),
            on_epoch=True,
            reduce_fx=getattr(torch, self.reduce_fx),
            sync_dist_fn=strategy.reduce,
            batch_size=0,
            **arguments,
        )


def logged(results: _ResultCollection) -> dict[str, _ResultMetric]:
    """Return what this rank has logged over the epoch or the evaluation, by Lightning's key, but for metrics of
    torchmetrics."""
    return {key: item for key, item in results.valid_items() if item.is_tensor and item.meta.on_epoch}


def joined(of_ranks: Sequence[Mapping[str, Logged]]) -> dict[str, Logged]:
    """Return what all ranks have logged, by key, in the order of the first rank that has a key."""
    whole: dict[str, Logged] = {}
    for parts in of_ranks:
        for key, part in parts.items():
            whole[key] = whole[key].joined(part) if key in whole else part
    return whole
