"""What all ranks exchange besides gradients and tensors of a checkpoint: a mean, and values of any type."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device

_BLOCK = 1024  # bytes that each rank sends at first: a value's length, and the value if it is short
_LENGTH = 4  # bytes


def mean_of_ranks(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over all ranks. Collective.

    Lightning's `Strategy.reduce` also waits at a barrier, which on a GPU waits for the device.
    """
    if not dist.is_available() or not dist.is_initialized():
        return tensor
    share = tensor / dist.get_world_size()  # before the sum, which 16 bits may not hold
    dist.all_reduce(share)
    return share


def of_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return a value of every rank, in the order of ranks. Collective.

    Args:
        group: None for all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    if (short := of_ranks_if_short(value, group)) is not None:
        return short
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def of_ranks_if_short(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return a value of every rank in one exchange; None on all ranks if a rank's is too long for it. Collective.

    Torch's functions for objects exchange lengths first.
    """
    pickled = pickle.dumps(value)
    block = (len(pickled).to_bytes(_LENGTH) + pickled[: _BLOCK - _LENGTH]).ljust(_BLOCK, b"\0")
    own = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(_get_object_coll_device(group))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group)
    blocks = [one.numpy().tobytes() for one in torch.stack(gathered).cpu()]
    lengths = [int.from_bytes(block[:_LENGTH]) for block in blocks]
    return None if max(lengths) > _BLOCK - _LENGTH else [pickle.loads(block[_LENGTH:]) for block in blocks]
