"""Clipping a gradient whose parts lie on different devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


@torch.no_grad()
def clip_by_norm(optimizer: Optimizer, max_norm: float) -> None:
    """Clip the gradients of an optimizer's parameters by their norm over all devices. Collective.

    `torch.nn.utils.clip_grad_norm_` does the same for parameters of one device mesh alone.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    norms = [
        _whole(get_total_norm([p.grad for p in parameters if p.grad is not None])) for parameters in by_mesh.values()
    ]
    total = get_total_norm(norms)
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total)


@torch.no_grad()
def clip_shards_by_norm(
    parameters: Iterable[nn.Parameter],
    sharded: Container[nn.Parameter],
    max_norm: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Clip gradients of which some are sharded over a process group as plain tensors. Collective.

    Args:
        parameters: all that are clipped together.
        sharded: those of which each rank of the group holds a part of the gradient; it holds others whole.
        device: where the norm is summed, in double precision where the device has it.
    """
    present = [parameter for parameter in parameters if parameter.grad is not None]
    squares = [
        get_total_norm([p.grad for p in present if p.grad is not None and (p in sharded) == is_sharded])
        .to(device, torch.float64 if device.type != "mps" else torch.float32)
        .square()
        for is_sharded in (True, False)
    ]
    dist.all_reduce(squares[0], group=group)
    clip_grads_with_norm_(present, max_norm, (squares[0] + squares[1]).sqrt())


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
