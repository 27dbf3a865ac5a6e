"""A cache of what operators return on fake tensors: a call with the same shapes is answered without the fake mode."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_NAMESPACES = ("aten", "fsdp")  # whose operators do no more than their schema says
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """Error: an argument can't be a part of the cache's key."""


@dataclass(frozen=True)
class _Made:
    """A tensor that an operator returns.

    Attributes:
        of: index of the tensor argument that is returned as it is or, with ``shape``, whose storage is shared; None for
            a new storage.
        shape: None for the argument itself.
    """

    of: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


@dataclass(frozen=True)
class _Recipe:
    """Return value of an operator: tensors, or nothing."""

    made: tuple[_Made, ...]
    as_returned: Callable[[list[Tensor]], Any]


class Repeats:
    """Cache of what operators return, by the shapes of their tensors.

    The fake mode has a cache of its own, whose keys cost more than most operators, and which leaves out `t` and
    `_unsafe_view`.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._recipes: dict[Hashable, _Recipe | None] = {}  # None: what can't be repeated

    def call(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operator, or make what it returns from the cache."""
        given: list[FakeTensor] = []
        try:
            key = self._key(func, args, kwargs, given)
        except _Unknown:
            return func(*args, **kwargs)
        if key in self._recipes:
            recipe = self._recipes[key]
            return func(*args, **kwargs) if recipe is None else self._again(recipe, given)
        out = func(*args, **kwargs)
        self._recipes[key] = self._recipe(func, given, out) if self._is_key(key, func, args, kwargs) else None
        return out

    def _is_key(self, key: Hashable, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether a call still has this key; not so if the operator has changed an argument's shape."""
        try:
            return self._key(func, args, kwargs, []) == key
        except _Unknown:
            return False

    def _key(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], given: list[FakeTensor]) -> Hashable:
        """Return the key of a call: the shapes of its tensors, which are appended to ``given``, and its other
        arguments."""
        key: list[Hashable] = [func, torch.get_default_dtype()]
        self._extend(key, args, given)
        if kwargs:
            key += kwargs
            self._extend(key, kwargs.values(), given)
        return tuple(key)

    def _extend(self, key: list[Hashable], those: Iterable[Any], given: list[FakeTensor]) -> None:
        for one in those:
            kind = type(one)
            if kind is FakeTensor:
                if one.fake_mode is not self._fake or one.constant is not None or one.layout is not torch.strided:
                    raise _Unknown
                given.append(one)
                key += (one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device)
                key += (one.is_conj(), one.is_neg(), one.untyped_storage().nbytes())  # 0: FSDP has freed it
            elif kind in _PLAIN:
                key += (kind, one)  # type: ignore[arg-type]  # a class is hashable; 1 is 1.0, and not of its dtype
            elif kind in (list, tuple):
                key.append(len(one))
                self._extend(key, one, given)
            else:
                raise _Unknown

    def _again(self, recipe: _Recipe, given: list[FakeTensor]) -> Any:
        return recipe.as_returned([self._tensor(made, given) for made in recipe.made])

    def _tensor(self, made: _Made, given: list[FakeTensor]) -> Tensor:
        if made.shape is None:
            assert made.of is not None
            return given[made.of]
        with in_kernel_invocation_manager(self._fake):
            if made.of is None:
                plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            else:
                plain = torch.as_strided(given[made.of], made.shape, made.stride, made.offset)
        return FakeTensor(self._fake, plain, made.device)

    def _recipe(self, func: OpOverload, given: list[FakeTensor], out: Any) -> _Recipe | None:
        if func.namespace not in _NAMESPACES or any(tag in func.tags for tag in _BY_VALUE):
            return None
        if func in self._fake.lift_fns:
            return None
        if out is None:
            return _Recipe((), lambda _: None)
        if type(out) is FakeTensor:
            outs, as_returned = [out], lambda made: made[0]
        elif type(out) in (list, tuple) and all(type(one) is FakeTensor for one in out):
            outs, as_returned = list(out), type(out)
        else:
            return None
        storages = [_storage(tensor) for tensor in given]
        fresh = [_storage(tensor) for tensor in outs if _storage(tensor) not in storages]
        if len(set(fresh)) < len(fresh):
            return None
        made = [self._made(tensor, given, storages) for tensor in outs]
        return None if None in made else _Recipe(tuple(made), as_returned)  # type: ignore[arg-type]  # none of them is None here

    def _made(self, tensor: FakeTensor, given: list[FakeTensor], storages: list[int]) -> _Made | None:
        for number, one in enumerate(given):
            if one is tensor:
                return _Made(number)
        if tensor.constant is not None or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
            return None
        if tensor.layout is not torch.strided or storages.count(_storage(tensor)) > 1:
            return None
        of = storages.index(_storage(tensor)) if _storage(tensor) in storages else None
        made = _Made(
            of, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device
        )
        if of is None:
            same = self._tensor(made, given)
            if same.untyped_storage().nbytes() != tensor.untyped_storage().nbytes() or made.offset:
                return None
        elif tensor.dtype != given[of].dtype or not tensor.untyped_storage().nbytes():
            return None
        return made


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
