"""Parameters that each device of a sharded model holds whole, as they can't be sharded with the others of their
unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


def replicated_parameters(unit: nn.Module, others: Container[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters of a unit that every device has to hold whole.

    Scalars and empty ones can't be cut; complex ones, and those of another dtype than most of the unit, can't be
    gathered with the others; a metric's network runs outside of the model's forward pass.

    Args:
        others: parameters of units inside of it, and of any that are replicated already.
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
    """Average a parameter's gradient over all ranks: a hook after a backward pass. Collective.

    What earlier passes of the step have averaged is equal on all ranks, so that its mean is itself.
    """
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
