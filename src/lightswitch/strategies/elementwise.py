"""Checks that an optimizer updates each element of a parameter independently, by steps on two small matrices.

Adam and SGD do. Updates of Adafactor, LAMB, Muon or LBFGS depend on rows, norms or products: if a rank steps a flat
shard of a parameter, they silently train differently than in one process.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import softplus
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightswitch.errors import Refused, listed

_STEPS = 5  # the first steps of some optimizers are elementwise: Prodigy's learning rate estimate acts from the third
_OF_DEVICES = ("capturable", "fused", "foreach")  # arguments that select another implementation of the same update
_OF_A_RUN = ("params", "param_names", "initial_lr", *_OF_DEVICES)  # keys of a group that don't affect the update rule
_RATE = 0.1  # learning rate of a trial: a schedule may begin at 0, and rates per layer are the same rule
_BUILDS_OPERATORS = "deepspeed"  # its optimizers are made for its shards, and take minutes to construct here
_ROUNDING = 1e-3  # tolerance, relative to the norm of the update
_HALF_ROUNDING = 0.05  # likewise, for optimizers that compute in 16 bits, such as Muon

Make = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Problem:
    """Matrices with a convex loss that has no minimum, in which each element has a different weight.

    LBFGS solves a loss with a minimum, from whole matrices as well as from shards, and takes plain gradient steps on a
    loss that is not convex: in both cases the results would not differ.
    """

    starts: list[Tensor]
    weights: list[Tensor]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return a problem with every tensor replaced by `change` of it."""
        return Problem([*map(change, self.starts)], [*map(change, self.weights)])


def refuse_in_pieces(optimizer: Optimizer) -> None:
    """Check that an optimizer can step the flat shards of parameters that DeepSpeed makes.

    Raises:
        Refused: it would train differently.
    """
    if not all(map(_is_elementwise, _makers(optimizer))):
        raise Refused(
            f"{type(optimizer).__name__} does not update each element independently, so it would train differently "
            "with the flat shards of DeepSpeed; use strategy=ddp or fsdp"
        )


def refuse_sharded(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Check that an optimizer can step DTensors. Collective if its updates are not elementwise.

    Args:
        mesh: one-dimensional mesh over which parameters are sharded.

    Raises:
        Refused: it fails for them, or would train differently.
    """
    for make in _makers(optimizer):
        if not _is_elementwise(make):
            _refuse_if_otherwise(make, optimizer, mesh)


def _refuse_if_otherwise(make: Make, optimizer: Optimizer, mesh: DeviceMesh) -> None:
    name, devices = type(optimizer).__name__, mesh.size()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # torch supports fewer operations where some parameter has shards of different sizes
    are_uneven = any(isinstance(one, DTensor) and one.ndim > 0 and len(one) % devices > 0 for one in parameters)
    problem = _problem(2 * devices, devices + are_uneven).changed(lambda tensor: tensor.to(mesh.device_type))
    try:
        shards = problem.changed(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
        tried = _stepped(make, shards)
        found = [parameter.full_tensor() for parameter in _values(tried)]  # type: ignore[attr-defined]  # of a DTensor
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise Refused(f"{name} fails with sharded parameters: {message}; use strategy=ddp") from error
    if not _are_alike(_values(_stepped(make, problem)), found, problem.starts, _HALF_ROUNDING):
        raise Refused(f"{name} would train differently with sharded parameters; use strategy=ddp")
    others = {
        str(key)
        for parameter, state in tried.state.items()
        for key, value in state.items()
        if any(isinstance(one, DTensor) and one.shape != parameter.shape for one in tree_leaves(value))
    }
    if others:  # a resume lays states out like the parameters of their shape
        raise Refused(
            f"{name} keeps shards of another shape than its parameters' ({listed(sorted(others))}), from which a "
            "sharded run can't be resumed; use strategy=ddp"
        )


def _makers(optimizer: Optimizer) -> list[Make]:
    """Return functions that construct such an optimizer over other parameters, one for each distinct set of group
    options; none for an optimizer that can't be tried.

    By convention, an optimizer's `defaults` hold its constructor's arguments.
    """
    kind = type(optimizer)
    is_planned = isinstance(torch.empty(0), FakeTensor)  # fake tensors have no values to compare
    if is_planned or kind.__module__.partition(".")[0] == _BUILDS_OPERATORS:
        return []
    taken = inspect.signature(kind.__init__).parameters
    given = {key: value for key, value in optimizer.defaults.items() if key in taken and key not in _OF_DEVICES}
    groups = [
        {key: _RATE if key == "lr" else value for key, value in group.items() if key not in _OF_A_RUN}
        for group in optimizer.param_groups
    ]
    distinct = {repr(options): options for options in groups}.values()
    makers = [partial(_of_group, kind, given, options) for options in distinct]
    return [make for make in makers if _can_be_tried(make)] or [*filter(_can_be_tried, [partial(kind, **given)])]


def _of_group(
    kind: Callable[..., Optimizer], given: dict[str, Any], options: dict[str, Any], parameters: list[Tensor]
) -> Optimizer:
    return kind([{**copy.deepcopy(options), "params": parameters}], **given)


def _can_be_tried(make: Make) -> bool:
    """Return whether the optimizer needs only matrices and their gradients."""
    try:
        _stepped(make, _problem(4, 3))
    except Exception:  # depends on what it needs
        return False
    return True


def _is_elementwise(make: Make) -> bool:
    """Return whether two flat halves, stepped by separate optimizers, end up equal to the whole."""
    problem = _problem(4, 3)
    whole = _values(_stepped(make, problem))
    try:
        halves = [_values(_stepped(make, problem.changed(partial(_half, index)))) for index in (0, 1)]
    except Exception:  # it does not support vectors
        return False
    joined = [torch.cat(both).view_as(start) for *both, start in zip(*halves, problem.starts, strict=True)]
    return _are_alike(whole, joined, problem.starts, _ROUNDING)


def _problem(rows: int, other_rows: int) -> Problem:
    shapes = ((rows, 6), (other_rows, 6))
    starts = [
        torch.linspace(first, last, math.prod(shape)).view(shape)
        for shape, first, last in zip(shapes, (-1, 2), (1, -1), strict=True)
    ]
    return Problem(starts, [torch.linspace(0.1, 3, start.numel()).view_as(start) for start in starts])


def _half(index: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[index].flatten()


def _stepped(make: Make, problem: Problem) -> Optimizer:
    """Return an optimizer of the problem's matrices after some steps."""
    parameters = [torch.nn.Parameter(start.clone()) for start in problem.starts]
    optimizer = make([*parameters])

    @torch.enable_grad()
    def closure() -> float:
        optimizer.zero_grad()
        losses = [(w * softplus(-p)).sum() for w, p in zip(problem.weights, parameters, strict=True)]
        loss = sum(losses[1:], losses[0])
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss.detach()  # type: ignore[return-value]  # as Lightning's closures do

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # the run's optimizer issues the same ones
        for _ in range(_STEPS):
            closure()
            optimizer.step(*[closure] if "closure" in inspect.signature(optimizer.step).parameters else [])
    return optimizer


def _values(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def _are_alike(own: list[Tensor], others: list[Tensor], starts: list[Tensor], tolerance: float) -> bool:
    return all(
        bool((other - one).norm() <= tolerance * (one - start).norm())
        for one, other, start in zip(own, others, starts, strict=True)
    )
