"""Muon for the matrices of a model's blocks and AdamW for all other parameters, in one optimizer."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from project.optimizer import decay_groups, is_matrix

ROOT = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration, by Jordan (2024)


class Muon(Optimizer):
    """Momentum whose update is orthogonalized, for matrices (Jordan 2024), and AdamW for all other parameters.

    An update of a matrix has the size of AdamW's (Liu et al. 2025), so that both use one learning rate and schedule.
    torch.optim.Muon takes matrices only, and computes in bfloat16, by which shards would train otherwise than one
    process: here each device has the whole matrix while it orthogonalizes it.

    Args:
        params: parameters or groups of them, of which matrices use Muon; or groups with `is_muon`, true or false.
        momentum: of Muon.
        betas: of AdamW.
        iteration_dtype: dtype of the iteration; bfloat16 is faster on GPUs.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        iteration_dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        adamw = AdamW([torch.zeros(1)], lr=lr, weight_decay=weight_decay, betas=betas)
        self.others = [adamw]  # in a list, as it is no inner optimizer with a state of its own
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "iteration_dtype": iteration_dtype}
        groups = [{**(own if group["is_muon"] else adamw.defaults), **group} for group in as_groups(params)]
        super().__init__(groups, {**own, "betas": betas})
        for group in self.param_groups:
            if group["is_muon"] and any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon orthogonalizes matrices; give other parameters a group with is_muon false")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (adamw,) = self.others
        adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        adamw.state = self.state
        adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if group["is_muon"] else ():
                if parameter.grad is not None:
                    self.step_matrix(parameter, group)
        return loss

    def step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(state["momentum_buffer"], momentum)  # Nesterov's
        update = orthogonalized(update, getattr(torch, group["iteration_dtype"]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-0.2 * math.sqrt(max(parameter.shape)) * group["lr"])

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of AdamW, and before them the weights of linear layers in the model's module lists.

        So embeddings and the head use AdamW. Raises ValueError if there is no such layer.
        """
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        layers = (one for blocks in lists for one in blocks.modules() if not isinstance(one, nn.Embedding))
        matrices = dict.fromkeys(one.weight for one in layers if is_matrix(one) and one.weight.requires_grad)
        if not matrices:
            raise ValueError("optimizer=muon finds no linear layer in an nn.ModuleList of the model; use adamw")
        others = [
            {**group, "params": [one for one in group["params"] if one not in matrices], "is_muon": False}
            for group in decay_groups(model)
        ]
        return [{"params": [*matrices], "is_muon": True}, *(group for group in others if group["params"])]


def as_groups(params: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield groups that have `is_muon`; one without it is two, of its matrices and of its other parameters."""
    given = [*params]
    for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
        if "is_muon" in group:
            yield group
            continue
        listed = [*group["params"]]
        for is_muon in (True, False):
            if own := [one for one in listed if (one.ndim == 2) == is_muon]:
                yield {**group, "params": own, "is_muon": is_muon}


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U Vᵀ of a matrix U S Vᵀ, by five Newton-Schulz iterations; of a DTensor, with its shards."""
    whole = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
    is_tall = whole.shape[0] > whole.shape[1]
    x: Tensor = (whole.T if is_tall else whole).to(dtype)
    x = x / (x.norm() + 1e-7)
    a, b, c = ROOT
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = (x.T if is_tall else x).to(matrix.dtype).contiguous()
    if isinstance(matrix, DTensor):  # each device has the same matrix, and takes its shard of it
        shards: Tensor = distribute_tensor(x, matrix.device_mesh, matrix.placements, src_data_rank=None)
        return shards
    return x
