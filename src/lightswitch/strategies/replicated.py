"""What each device of a sharded model holds whole: buffers, scalars, and the networks inside of metrics."""

from __future__ import annotations

from collections import defaultdict

import torch
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


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """Rank 0's on every rank, as under ddp: the running statistics of a batch norm differ by what a rank has seen."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for buffer in model.buffers():
        by_dtype[buffer.dtype].append(buffer)
    for buffers in by_dtype.values():
        values = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(values, src=0)
        for buffer, value in zip(buffers, torch.split(values, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))
