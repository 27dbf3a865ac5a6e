"""What ranks gather from one another: numbers, and tensors of which some may have fewer rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightswitch.errors import Refused

_MOST_DIMENSIONS = 64  # of a tensor, in torch


def numbers_of_ranks(
    numbers: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """Return the numbers of every rank, in the order of ranks. Collective.

    Args:
        device: that the group's backend can send from.
        group: None for all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [[*numbers]]
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return [row.tolist() for row in gathered]


def shapes_of_ranks(tensor: Tensor, group: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that several ranks hold; nothing for one process. Collective.

    A planned tensor has no values to exchange, and counts as one process's.
    """
    if isinstance(tensor, FakeTensor) or not dist.is_available() or not dist.is_initialized():
        return []
    own = torch.tensor([tensor.ndim, *tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.ndim)], device=tensor.device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    if len(gathered) > 1:
        dist.all_gather(gathered, own, group=group)
        return [tuple(sizes[:dimensions]) for dimensions, *sizes in torch.stack(gathered).tolist()]
    return []


def filled(tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Return a tensor with as many rows as the longest, its last row repeated for those that it lacks; else zeros.

    It stays a part of the graph also where it has no row: the other ranks' backward passes wait for its own.

    Raises:
        Refused: shapes differ in more than the number of rows.
    """
    first = shapes[0]
    for rank, shape in enumerate(shapes):
        if shape != first and (not first or not shape or shape[1:] != first[1:]):
            raise Refused(
                f"self.all_gather: rank 0 has a tensor of shape {first}, rank {rank} one of {shape}; ranks may differ "
                "in the first dimension alone, that of samples"
            )
    lacking = max(shape[0] for shape in shapes) - len(tensor)
    last = tensor[-1:] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
    return torch.cat([tensor, last.expand(lacking, *tensor.shape[1:])])
