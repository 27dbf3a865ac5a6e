"""Parameters that each device of a sharded model holds whole: scalars, and the networks inside of metrics."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


def replicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """A scalar can't be cut, and a metric's network runs outside of the model's forward pass."""
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    metrics = (part for part in model.modules() if isinstance(part, Metric))
    return scalars.union(*(metric.parameters() for metric in metrics))


def average_gradient(parameter: Tensor) -> None:
    """A hook after a backward pass. What earlier ones have averaged is equal on all ranks, so its mean is itself."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
