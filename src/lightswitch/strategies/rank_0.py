"""Broadcasts from rank 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's tensor as a new one on the device. Collective.

    Args:
        tensor: of the same shape and dtype on every rank; on others than 0 it may be on the meta device.
    """
    if dist.get_rank() == 0:
        value = tensor.detach().to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(value.flatten().view(torch.uint8), src=0)  # as bytes: NCCL and gloo do not know every dtype
    return value


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place by rank 0's, those of one dtype and device at once, in a copy of them all.
    Collective."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    for (_, device), group in alike.items():
        values = broadcast_tensor(torch.cat([tensor.flatten() for tensor in group]), device)
        for tensor, value in zip(group, torch.split(values, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(value.view(tensor.shape))
