"""Whether an optimizer changes each element of a parameter by itself, tried on two small matrices.

Adam and SGD do. Adafactor, LAMB, Muon or LBFGS go by rows, norms or products: where a rank steps a flat piece of a
parameter, they train otherwise than in one process, without a word.
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

from lightswitch.errors import Refused

_STEPS = 5  # some change at first what others would: Prodigy's estimate of a rate acts from the third on
_OF_DEVICES = ("capturable", "fused", "foreach")  # arguments that ask for another way to the same numbers
_OF_A_RUN = ("params", "param_names", "initial_lr", *_OF_DEVICES)  # of a group: not what it does with its parameters
_BUILDS_OPERATORS = "deepspeed"  # whose optimizers are made for its pieces, and take minutes to be made here
_ROUNDING = 1e-3  # of an update, as a share of it
_HALF_ROUNDING = 0.05  # likewise, of optimizers that compute in 16 bits, as Muon does

Make = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Problem:
    """Matrices whose loss is convex and has no minimum, each element with a weight of its own in it.

    LBFGS solves what has one, whole or in pieces, and steps by the gradient alone what is not convex: the two would be
    alike.
    """

    starts: list[Tensor]
    weights: list[Tensor]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return the same with other tensors in place of these."""
        return Problem([*map(change, self.starts)], [*map(change, self.weights)])


@dataclass(frozen=True)
class Stepped:
    """Parameters after some steps, and the floats that the optimizer then has in its groups."""

    parameters: list[Tensor]
    numbers: list[float]


def refuse_in_pieces(optimizer: Optimizer, strategy: str) -> None:
    """Check that an optimizer may step flat pieces of parameters.

    Args:
        strategy: that cuts them, in words.

    Raises:
        Refused: it would train otherwise.
    """
    if not all(map(_is_elementwise, _makers(optimizer))):
        raise Refused(
            f"{type(optimizer).__name__} does not change each element by itself, and {strategy} gives each device flat "
            "pieces of parameters, with which it would train otherwise; use strategy=ddp or fsdp"
        )


def refuse_sharded(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Check that an optimizer may step sharded parameters that keep their shapes. Collective where it is in doubt.

    Args:
        mesh: that parameters are sharded over, of one dimension.

    Raises:
        Refused: it fails for them, or would train otherwise.
    """
    for make in _makers(optimizer):
        if not _is_elementwise(make):
            _refuse_if_otherwise(make, optimizer, mesh)


def _refuse_if_otherwise(make: Make, optimizer: Optimizer, mesh: DeviceMesh) -> None:
    name, devices = type(optimizer).__name__, mesh.size()
    problem = _problem(2 * devices, devices + _are_uneven(optimizer, devices))
    problem = problem.changed(lambda tensor: tensor.to(mesh.device_type))
    try:
        sharded = _stepped(make, problem.changed(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])))
        found = Stepped([_whole(parameter) for parameter in sharded.parameters], sharded.numbers)
    except Exception as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise Refused(f"{name} fails for sharded parameters, {told}; use strategy=ddp") from error
    if not _are_alike(_stepped(make, problem), found, problem.starts, _HALF_ROUNDING):
        raise Refused(f"{name} would train otherwise with sharded parameters; use strategy=ddp")


def _are_uneven(optimizer: Optimizer, devices: int) -> bool:
    """Return whether devices have parts of different sizes of some parameter, with which torch can do less."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return any(isinstance(one, DTensor) and one.ndim > 0 and len(one) % devices > 0 for one in parameters)


def _whole(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


def _makers(optimizer: Optimizer) -> list[Make]:
    """Return what makes such optimizers of other parameters, one for each way that a group has; none that can't be
    tried.

    By convention, what a constructor takes is in an optimizer's `defaults`.
    """
    kind = type(optimizer)
    is_planned = isinstance(torch.empty(0), FakeTensor)  # which have no values to compare
    if is_planned or kind.__module__.partition(".")[0] == _BUILDS_OPERATORS:
        return []
    taken = inspect.signature(kind.__init__).parameters
    given = {key: value for key, value in optimizer.defaults.items() if key in taken and key not in _OF_DEVICES}
    ways: dict[str, dict[str, Any]] = {}
    for options in map(_options, optimizer.param_groups):
        ways.setdefault(repr({**options, "lr": None}), options)  # rates by layer are one way
    makers = [partial(_of_group, kind, given, options) for options in ways.values()]
    return [make for make in makers if _can_be_tried(make)] or [*filter(_can_be_tried, [partial(kind, **given)])]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group says of its parameters, with the rate that it has before a schedule begins at 0."""
    options = {key: value for key, value in group.items() if key not in (*_OF_A_RUN, "lr")}
    rate = group.get("initial_lr", group.get("lr"))
    return {**options, "lr": rate} if rate else options


def _of_group(
    kind: Callable[..., Optimizer], given: dict[str, Any], options: dict[str, Any], parameters: list[Tensor]
) -> Optimizer:
    return kind([{**copy.deepcopy(options), "params": parameters}], **given)


def _can_be_tried(make: Make) -> bool:
    """Return whether the optimizer asks for no more than matrices and their gradients."""
    try:
        _stepped(make, _problem(4, 3))
    except Exception:  # whatever it asks for
        return False
    return True


def _is_elementwise(make: Make) -> bool:
    """Return whether two halves that are stepped by optimizers of their own come to what the whole does."""
    problem = _problem(4, 3)
    whole = _stepped(make, problem)
    try:
        one, other = (_stepped(make, problem.changed(half)) for half in (_first_half, _second_half))
    except Exception:  # it takes no vectors
        return False
    pairs = zip(one.parameters, other.parameters, problem.starts, strict=True)
    joined = [torch.cat(halves).view_as(start) for *halves, start in pairs]
    return all(_are_alike(whole, Stepped(joined, half.numbers), problem.starts, _ROUNDING) for half in (one, other))


def _problem(rows: int, other_rows: int) -> Problem:
    shapes = ((rows, 6), (other_rows, 6))
    starts = [
        torch.linspace(first, last, math.prod(shape)).view(shape)
        for shape, first, last in zip(shapes, (-1, 2), (1, -1), strict=True)
    ]
    return Problem(starts, [torch.linspace(0.1, 3, start.numel()).view_as(start) for start in starts])


def _first_half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[0].flatten()


def _second_half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[1].flatten()


def _stepped(make: Make, problem: Problem) -> Stepped:
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
        warnings.simplefilter("ignore")  # the run's own optimizer tells them
        for _ in range(_STEPS):
            closure()
            optimizer.step(*[closure] if "closure" in inspect.signature(optimizer.step).parameters else [])
    numbers = [value for group in optimizer.param_groups for value in group.values() if isinstance(value, float)]
    return Stepped([parameter.detach() for parameter in parameters], numbers)


def _are_alike(one: Stepped, other: Stepped, starts: list[Tensor], tolerance: float) -> bool:
    same_numbers = len(one.numbers) == len(other.numbers) and all(
        math.isclose(number, its, rel_tol=tolerance) for number, its in zip(one.numbers, other.numbers, strict=True)
    )
    return same_numbers and all(
        bool((its - parameter).norm() <= tolerance * (parameter - start).norm())
        for parameter, its, start in zip(one.parameters, other.parameters, starts, strict=True)
    )
