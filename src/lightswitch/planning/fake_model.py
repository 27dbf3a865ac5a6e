"""A module whose tensors have shapes, dtypes and a device, and no memory."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

CPU = torch.device("cpu")  # of another device, fake tensors ask for that device's driver


def fake_tensors(model: LightningModule, fake: FakeTensorMode) -> None:
    """Replace the tensors of a module by fake ones of the CPU: parameters, buffers, states of metrics.

    Args:
        model: may be on the meta device; tied parameters stay tied.
    """
    replaced: dict[Tensor, Tensor] = {}
    for part in model.modules():
        if isinstance(part, Metric) and part.device.type == "meta":
            part._apply(lambda tensor: torch.empty_like(tensor, device=CPU))  # its own way to remember another device
        kept = {name: value for name, value in vars(part).items() if name != "_modules"}
        vars(part).update(tree_map_only(Tensor, lambda tensor: _fake(tensor, fake, replaced), kept))


def _fake(tensor: Tensor, fake: FakeTensorMode, replaced: dict[Tensor, Tensor]) -> Tensor:
    if tensor not in replaced:
        plain = tensor.detach()
        if plain.is_meta:
            made = fake.fake_tensor_converter.from_meta_and_device(fake, plain, CPU)
        else:
            made = fake.from_tensor(plain)
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[tensor] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return replaced[tensor]
