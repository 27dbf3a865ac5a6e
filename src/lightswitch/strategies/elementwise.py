"""Whether an optimizer changes each element of a parameter by itself, tried on a small matrix.

Adam and SGD do. Adafactor, LAMB, Muon or LBFGS go by rows, norms or products: where a rank steps a flat piece of a
parameter, they train otherwise than in one process, without a word.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lightswitch.errors import Refused

_STEPS = 2
_OF_DEVICES = ("capturable", "fused", "foreach")  # arguments that ask for another way to the same numbers
_BUILDS_OPERATORS = "deepspeed"  # whose optimizers are made for its pieces, and take minutes to be made here
_ROUNDING = 1e-3  # of an update, as a share of it
_HALF_ROUNDING = 0.05  # likewise, of optimizers that compute in 16 bits, as Muon does

Make = Callable[[list[Tensor]], Optimizer]


def refuse_in_pieces(optimizer: Optimizer, strategy: str) -> None:
    """Check that an optimizer may step flat pieces of parameters.

    Args:
        strategy: that cuts them, in words.

    Raises:
        Refused: it would train otherwise.
    """
    if (make := _maker(optimizer)) is not None and not _is_elementwise(make):
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
    make = _maker(optimizer)
    if make is None or _is_elementwise(make):
        return
    name, start = type(optimizer).__name__, _start().to(mesh.device_type)
    try:
        sharded = _stepped(make, distribute_tensor(start, mesh, [Shard(0)]))
    except Exception as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise Refused(f"{name} fails for sharded parameters, {told}; use strategy=ddp") from error
    assert isinstance(sharded, DTensor)
    if not _are_alike(_stepped(make, start), sharded.full_tensor(), start, _HALF_ROUNDING):
        raise Refused(f"{name} would train otherwise with sharded parameters; use strategy=ddp")


def _maker(optimizer: Optimizer) -> Make | None:
    """Return what makes such an optimizer of other parameters; None where that can't be told.

    By convention, what a constructor takes is in an optimizer's `defaults`.
    """
    kind = type(optimizer)
    is_planned = isinstance(torch.empty(0), FakeTensor)  # which have no values to compare
    if is_planned or kind.__module__.partition(".")[0] == _BUILDS_OPERATORS:
        return None
    taken = inspect.signature(kind.__init__).parameters
    given = {key: value for key, value in optimizer.defaults.items() if key in taken and key not in _OF_DEVICES}

    def make(parameters: list[Tensor]) -> Optimizer:
        return kind(parameters, **given)

    try:
        _stepped(make, _start())
    except Exception:  # it asks for more than a matrix and its gradient
        return None
    return make


def _is_elementwise(make: Make) -> bool:
    """Return whether two halves that are stepped by optimizers of their own come to what the whole does."""
    start = _start()
    whole = _stepped(make, start)
    try:
        halves = [_stepped(make, half.flatten(), first) for half, first in zip(start.chunk(2), (0, 12), strict=True)]
    except Exception:  # it takes no vectors
        return False
    return _are_alike(whole, torch.cat(halves).view_as(start), start, _ROUNDING)


def _start() -> Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def _stepped(make: Make, start: Tensor, first: int = 0) -> Tensor:
    """Return elements after some steps, of whose loss each has a part of its own.

    Args:
        first: the number of the first element, by which the parts differ.
    """
    parameter = torch.nn.Parameter(start.clone())
    weights = torch.linspace(0.1, 3, 24)[first : first + start.numel()].view(start.shape).to(start.device)
    if isinstance(start, DTensor):
        weights = distribute_tensor(weights, start.device_mesh, start.placements)
    optimizer = make([parameter])

    @torch.enable_grad()
    def closure() -> float:
        optimizer.zero_grad()
        loss = (weights * (parameter - 0.3) ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss.detach()  # type: ignore[return-value]  # as Lightning's closures do

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # the run's own optimizer tells them
        for _ in range(_STEPS):
            closure()
            optimizer.step(*[closure] if "closure" in inspect.signature(optimizer.step).parameters else [])
    return parameter.detach()


def _are_alike(one: Tensor, other: Tensor, start: Tensor, tolerance: float) -> bool:
    update = one - start
    return bool((other - one).norm() <= tolerance * update.norm())
