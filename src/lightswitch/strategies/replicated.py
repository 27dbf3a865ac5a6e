"""Parameters that each device of a sharded model holds whole: they can't be sharded with the others of their unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


def replicated_parameters(unit: nn.Module, others: Container[nn.Parameter]) -> set[nn.Parameter]:
    """Scalars and empty ones can't be cut; complex ones, and those of another dtype than most of the unit, can't be
    gathered with the others; a metric's network runs outside of the model's forward pass.

    Args:
        others: parameters of units inside of it.
    """
    own = [parameter for parameter in unit.parameters() if parameter not in others]
    counts: Counter[torch.dtype] = Counter()
    for parameter in own:
        counts[parameter.dtype] += 0 if parameter.is_complex() else parameter.numel()
    most = max(counts, key=counts.__getitem__, default=torch.float32)
    whole = {parameter for parameter in own if parameter.dtype != most or parameter.is_complex()}
    whole |= {parameter for parameter in own if parameter.ndim == 0 or parameter.numel() == 0}
    metrics = (part for part in unit.modules() if isinstance(part, Metric))
    return whole.union(*(metric.parameters() for metric in metrics))


def average_gradient(parameter: Tensor) -> None:
    """A hook after a backward pass. What earlier ones have averaged is equal on all ranks, so its mean is itself."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
