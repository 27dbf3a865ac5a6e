"""Clipping a gradient whose parts lie on different device meshes."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


@torch.no_grad()
def clip_by_norm(optimizer: Optimizer, max_norm: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_` over the optimizer's parameters, which takes one mesh alone."""
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


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
