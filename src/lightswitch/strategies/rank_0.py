"""Rank 0's values on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def of_rank_0(tensor: Tensor, device: torch.device) -> Tensor:
    """A new tensor, on the device. Other ranks' own may be on meta."""
    if dist.get_rank() == 0:
        value = tensor.detach().to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(value.flatten().view(torch.uint8), src=0)  # as bytes: NCCL and gloo do not know every dtype
    return value


@torch.no_grad()
def share(tensors: Iterable[Tensor]) -> None:
    """In place; what is of one dtype at once, in a copy of it all."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    for (_, device), group in alike.items():
        values = of_rank_0(torch.cat([tensor.flatten() for tensor in group]), device)
        for tensor, value in zip(group, torch.split(values, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(value.view(tensor.shape))
