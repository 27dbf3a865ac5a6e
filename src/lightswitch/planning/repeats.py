"""Simulate a model's repeated units once: all between the second and the last take what these two have taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightswitch import patches
from lightswitch.planning.ledger import Block, Change, Ledger, tensors_in

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class _Pass:
    """A forward pass that others repeat.

    Attributes:
        start, end: its changes in the ledger.
        given: the storage of its input, which its caller may free after it.
        leaves, structure: what it returns, with `_Repeated` in place of its tensor.
    """

    path: str
    start: int
    end: int
    given: Block | None
    leaves: list[Any]
    structure: Any

    def changes(self, of: Sequence[Change]) -> list[Change]:
        freed = [one for one in of[self.end :] if one[0] is self.given and one[1] < 0]
        return [*of[self.start : self.end], *freed[:1]]


class Repetition:
    """Units of one kind, of which the first two and the last are simulated; what the first is given is no unit's.

    The forward pass of another one returns its input, whose shape its output has, and records again what the second has
    recorded; its backward pass records again what the last has recorded, and makes gradients for its own parameters.
    """

    def __init__(self, ledger: Ledger, units: Mapping[str, nn.Module]) -> None:
        self._ledger = ledger
        _, *others, (self._last, last) = units.items()
        self._name_of = {parameter: name for name, parameter in last.named_parameters()}
        self._passes: dict[Any, _Pass] = {}  # forward passes that others repeat, by what they are given
        self._backward_changes: Sequence[Change] = ()  # of the last unit
        self._looked_at = 0  # number of changes
        for path, unit in others:
            patches.replace(unit, "forward", partial(self._forward, path, unit, unit.forward))

    def _forward(self, path: str, unit: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._ledger.is_in_forward:  # recomputed
            return forward(*args, **kwargs)
        given, key, changes = tensors_in((args, kwargs)), self._given(args, kwargs), self._ledger.changes
        if key in self._passes and not _is_hooked(unit):
            known = self._passes[key]
            self._ledger.repeated[self._last] += 1
            self._ledger.repeat(known.changes(changes), known.path, path, lambda parameters: 0)
            parameters = [one for one in unit.parameters() if one.requires_grad]
            result = _Repeated.apply(partial(self._backward, path, unit), given[0], *parameters)  # type: ignore[no-untyped-call]  # untyped in torch
            return tree_unflatten([result if one is _Repeated else one for one in known.leaves], known.structure)
        start, reads = len(changes), self._ledger.values.replaced.total()
        out = forward(*args, **kwargs)
        leaves, structure = tree_flatten(out)
        made = [one for one in leaves if isinstance(one, Tensor)]
        is_like_input = len(made) == 1 and given and _kind(made[0]) == _kind(given[0]) and given[0].requires_grad
        if is_like_input and self._ledger.values.replaced.total() == reads:
            leaves = [_Repeated if isinstance(one, Tensor) else one for one in leaves]
            source = self._ledger.block_of(given[0])
            self._passes[key] = _Pass(path, start, len(changes), source, leaves, structure)
        return out

    def _given(self, args: Any, kwargs: Any) -> Any:
        """Return what decides what a forward pass takes: the step, and the kinds of tensors that it is given."""
        leaves = tree_leaves((args, kwargs))
        return len(self._ledger.steps), *(_kind(one) if isinstance(one, Tensor) else id(one) for one in leaves)

    def _backward(self, path: str, unit: nn.Module) -> list[Tensor | None]:
        """Record a backward pass again, and return the gradients of a unit's trained parameters."""
        made: dict[str, Tensor] = {}

        def gradients(of: Iterable[nn.Parameter]) -> int:
            own = {self._name_of[one]: unit.get_parameter(self._name_of[one]) for one in of}
            if len(own) == 1:
                made.update({name: torch.empty_like(parameter) for name, parameter in own.items()})
                return sum(made[name].nbytes for name in own)
            sizes = [one.numel() for one in own.values()]
            storage = next(iter(own.values())).new_empty(sum(sizes))
            parts = zip(own.items(), storage.split(sizes), strict=True)  # type: ignore[no-untyped-call]  # untyped in torch
            made.update({name: part.view_as(parameter) for (name, parameter), part in parts})
            return storage.nbytes

        if found := self._ledger.backward_changes(self._last, self._looked_at):
            self._backward_changes = found
        self._ledger.repeat(self._backward_changes, self._last, path, gradients)
        self._looked_at = len(self._ledger.changes)
        return [made.get(name) for name, one in unit.named_parameters() if one.requires_grad]


class _Repeated(torch.autograd.Function):
    """Function that returns its input, and whose backward pass calls another function for its parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Any, given: Tensor, *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient, *ctx.gradients()


def repetitions(units: Mapping[str, nn.Module]) -> list[dict[str, nn.Module]]:
    """Return the units that differ in nothing but the values of their tensors, four or more of a kind, by path."""
    kinds: list[dict[str, nn.Module]] = []
    for path, unit in units.items():
        same = next((kind for kind in kinds if _is_same(next(iter(kind.values())), unit, set())), None)
        if same is None:
            kinds.append(same := {})
        same[path] = unit
    return [kind for kind in kinds if len(kind) > 3]


def _is_same(one: Any, other: Any, compared: set[tuple[int, int]]) -> bool:
    """Return whether two values differ in nothing but the values of their tensors.

    Args:
        compared: ids of the pairs that are compared already, as a part may hold what it is a part of.
    """
    if one is other or (id(one), id(other)) in compared:
        return True
    if type(one) is not type(other):
        return False
    compared.add((id(one), id(other)))
    if isinstance(one, nn.Module):
        return _is_same(vars(one), vars(other), compared)
    if isinstance(one, Tensor):
        return _kind(one) == _kind(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key], compared) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other, repeat(compared)))
    try:
        return bool(one == other)
    except Exception:  # as of an array, which is neither equal nor unequal
        return False


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _is_hooked(unit: nn.Module) -> bool:
    return any(getattr(part, hooks) for part in unit.modules() for hooks in _HOOKS)
