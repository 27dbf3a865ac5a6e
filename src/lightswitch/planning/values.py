"""Values of fake tensors that a planned step reads, and a cache of operator results."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lightswitch import patches
from lightswitch.errors import NeedsValues, shown
from lightswitch.failures.classify import is_of_others

_FLOATS, _INTEGERS, _BOOLS = (0.5, 0.0, -8.0, 8.0), (1, 0, 2, 3), (True, False, True, False)  # the first is the guess
_MOST_ELEMENTS = 2**20  # largest tensor whose true values are computed
_PATIENCE, _MOST_ASKED = 100, 1000  # reads by one source line in one module and micro-batch
_INDEX, _SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_SIMULATION = "lightswitch.planning.simulation"
_PASSED = ("torch.", "lightswitch.")


class Values:
    """Values of fake tensors, for operators and methods that depend on them.

    Values that follow from the batch alone, such as the longest of its sequence lengths, are computed exactly beside
    the step. All others are guessed: a float is 0.5, an integer 1 and a bool True, unless the bool is computed from
    other guesses, such as `isnan(x)` or `x > 3`, which are False for 0.5. Results whose size depends on values get the
    largest possible size: `nonzero`, `unique`, `x[mask]`. A source line that reads values more than 100 times gets 0,
    or the opposite bool, every second time, because it may be in a loop that ends on a value.

    Args:
        where: returns the path of the running module.

    Attributes:
        guessed: number of guessed reads by each line of the user's code, in the micro-batch with the most reads.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.guessed: Counter[str] = Counter()
        self._where = where
        self._asked: Counter[tuple[str, str]] = Counter()
        self._known = _Notes()  # fake tensor -> real tensor with its values
        self._likely = _Notes()  # fake tensor -> value of an element for each of the candidate values

    def restart(self) -> None:
        """Reset the read counts at the start of a micro-batch."""
        self._asked.clear()

    def know(self, tensor: Tensor, real: Tensor) -> None:
        """Record the real values of a tensor of the batch."""
        if real.numel() <= _MOST_ELEMENTS and real.layout == torch.strided:
            with _disable_current_modes():
                self._known.put(tensor, real.detach().clone())

    def read(self, tensor: Tensor, method: Callable[[Tensor], Any]) -> Any:
        """Return the result of a value-reading method for a fake tensor."""
        is_other = self._ask([tensor])
        with _disable_current_modes():
            return method(self._real(tensor, is_other))

    def answer(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator whose output depends on values."""
        is_size = torch.Tag.data_dependent_output not in func.tags
        is_other = self._ask(_tensors(args[1] if func in (_INDEX, _SELECT, _PACK) else (args, kwargs)))
        if func is _INDEX:
            return func(args[0], [one for index in args[1] for one in self._places(index, is_other)])
        if func is _SELECT:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # untyped in torch
            times = shape.numel() // max(1, args[1].numel())
            return args[0].new_empty(times * self._count(args[1], is_other))
        distinct = "unique" in func._opname
        with _disable_current_modes():
            is_largest = is_size and not is_other
            real = partial(self._sized, distinct) if is_largest else partial(self._real, is_other=is_other)
            out = func(*tree_map_only(FakeTensor, real, args), **tree_map_only(FakeTensor, real, dict(kwargs)))
        fake = tree_map_only(Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), out)
        return (fake[0], out[1]) if func is _PACK else fake  # torch reads the batch sizes in C++, so they stay real

    def follow(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]) -> None:
        """Derive the known and likely values of the tensors that an operator has returned."""
        first = args[0] if args else None
        while isinstance(first, list | tuple) and first:
            first = first[0]
        is_followed = not isinstance(first, FakeTensor) or first in self._known or first in self._likely
        if not is_followed and (not made or made[0].dtype != torch.bool):
            return
        given = _tensors((args, kwargs))
        if made and self._is_true(func, given, made):
            with _disable_current_modes():
                real = partial(self._real, is_other=False)
                out = func(*tree_map_only(FakeTensor, real, args), **tree_map_only(FakeTensor, real, dict(kwargs)))
            for tensor, values in zip(made, _tensors(out), strict=True):
                self._known.put(tensor, values)
            return
        for tensor in (*made, *(given if func._schema.is_mutable else ())):
            self._known.remove(tensor)
        is_inexact = len(made) != 1 or made[0].dtype.is_floating_point
        if not is_inexact and (made[0].dtype == torch.bool or any(one in self._likely for one in given)):
            self._likely.put(made[0], self._follows(func, args, kwargs, given, made[0]))

    def _is_true(self, func: OpOverload, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._opname:
            return False
        is_small = all(isinstance(one, FakeTensor) and one.numel() <= _MOST_ELEMENTS for one in made)
        return is_small and self._are_known(given) and all(one.device.type == "cpu" for one in made)

    def _follows(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], made: Tensor
    ) -> Tensor:
        """Return the value of an output element for each of the candidate values."""
        with _disable_current_modes():
            if torch.Tag.pointwise in func.tags:
                args, kwargs = tree_map_only(Tensor, self._element, (args, dict(kwargs)))
                out: Tensor = func(*args, **kwargs)
                return out.to(made.dtype)
            of = next((one for one in given if one in self._likely or one.dtype == torch.bool), made)
            times = of.numel() // max(1, made.numel()) if func._opname == "sum" else 1
            return (self._element(of) * times).to(made.dtype)

    def _element(self, tensor: Tensor) -> Tensor:
        if (likely := self._likely.get(tensor)) is not None:
            return likely.clone()
        known = self._known.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        if known is not None and known.numel():
            return known.flatten()[:1].repeat(len(_FLOATS))
        guesses = _BOOLS if tensor.dtype == torch.bool else _INTEGERS
        inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return torch.tensor(_FLOATS if inexact else guesses).to(tensor.dtype)

    def _real(self, tensor: Tensor, is_other: bool) -> Tensor:
        if (known := self._known.get(tensor)) is not None:
            return known
        value = self._element(tensor)[0]
        if is_other:
            value = ~value if tensor.dtype == torch.bool else value.new_zeros(())
        return value.expand(tensor.shape)

    def _sized(self, distinct: bool, tensor: Tensor) -> Tensor:
        """Return values for which the operator's result has the largest possible size."""
        if tensor in self._known or not (distinct or tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
            return self._real(tensor, is_other=False)
        if tensor.dtype == torch.bool and not distinct:
            return self._element(tensor).any().expand(tensor.shape)
        return torch.arange(1, 1 + tensor.numel()).to(tensor.dtype).view(tensor.shape)

    def _places(self, index: Tensor | None, is_other: bool) -> list[Tensor | None]:
        """Replace a mask in an index by index tensors, one for each of the mask's dimensions."""
        if index is None or index.dtype != torch.bool:
            return [index]
        count = self._count(index, is_other)
        return [torch.empty(count, dtype=torch.long) for _ in index.shape]

    def _count(self, mask: Tensor, is_other: bool) -> int:
        with _disable_current_modes():
            values = self._real(mask, is_other=True) if is_other else self._sized(False, mask)
            return int(values.count_nonzero())

    def _are_known(self, given: Sequence[Tensor]) -> bool:
        return all(one in self._known or not isinstance(one, FakeTensor) for one in given)

    def _ask(self, given: Sequence[Tensor]) -> bool:
        """Count a read unless the values are known, and return whether to answer with the opposite of the guess.

        Raises:
            NeedsValues: one source line has read values more than 1000 times.
        """
        if self._are_known(given):
            return False
        place = _place()
        self._asked[place, self._where()] += 1
        times = self._asked[place, self._where()]
        if times > _MOST_ASKED:
            raise NeedsValues(
                f"reads tensor values at {place} more than {_MOST_ASKED} times, probably in a loop that depends on them"
            )
        self.guessed[place] = max(self.guessed[place], sum(n for (at, _), n in self._asked.items() if at == place))
        return times > _PATIENCE and times % 2 == 0


class _Notes:
    """Mapping from tensors to tensors that drops an entry when its key is freed."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._noted

    def get(self, tensor: Tensor) -> Tensor | None:
        return self._noted.get(id(tensor), (None, None))[1]

    def put(self, tensor: Tensor, noted: Tensor) -> None:
        key = id(tensor)
        self._noted[key] = weakref.ref(tensor, lambda _: self._noted.pop(key, None)), noted

    def remove(self, tensor: Tensor) -> None:
        self._noted.pop(id(tensor), None)


def patch_value_reads(values: Values | None) -> None:
    """Patch the methods of fake tensors that read values in C++ so that ``values`` answers; None undoes it."""
    if values is None:
        methods = {"numpy": Tensor.numpy, "tolist": _TOLIST, "__format__": Tensor.__format__}
    else:
        methods = {
            "numpy": lambda self, **options: values.read(self, lambda real: real.numpy(**options)),
            "tolist": lambda self: values.read(self, Tensor.tolist),
            "__format__": lambda self, text: values.read(self, lambda real: format(real, text)),
        }
    patches.replace(FakeTensor, "numpy", methods["numpy"])
    patches.replace(FakeTensor, "tolist", methods["tolist"])
    patches.replace(FakeTensor, "__format__", methods["__format__"])


_TOLIST = FakeTensor.tolist


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place() -> str:
    """Return the file and line of the user's code that reads a value.

    If there is none, return that of a library other than torch and lightswitch; empty if there is none either.
    """
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")  # code that torch.fx generates has none
        if module == _SIMULATION:
            break
        if not is_of_others(frame.f_code.co_filename):
            found = frame
            break
        if found is None and not module.startswith(_PASSED):
            found = frame
        frame = frame.f_back
    return "" if found is None else f"{shown(Path(found.f_code.co_filename))}:{found.f_lineno}"


_NAMESPACES = ("aten", "fsdp")  # their operators have no effects beyond their schema
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """An argument can't be part of a cache key."""


@dataclass(frozen=True)
class _Made:
    """A tensor that an operator returns.

    Attributes:
        of: index of the tensor argument that is returned unchanged or, if ``shape`` is set, whose storage is shared;
            None for a new storage.
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
    """Recipe for rebuilding an operator's return value: tensors, or nothing."""

    made: tuple[_Made, ...]
    as_returned: Callable[[list[Tensor]], Any]


class Repeats:
    """Cache of operator results, by the shapes of their tensors.

    FakeTensorMode has a cache, too, but its keys cost more than most operators, and it excludes `t` and
    `_unsafe_view`.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._recipes: dict[Hashable, _Recipe | None] = {}  # None: not cacheable

    def call(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operator, or build its result from the cache."""
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
        """Return whether a call still has this key, which is False if the operator changed an argument's shape."""
        try:
            return self._key(func, args, kwargs, []) == key
        except _Unknown:
            return False

    def _key(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], given: list[FakeTensor]) -> Hashable:
        """Return the cache key of a call: the layout of its tensors and its other arguments.

        The tensors are appended to ``given``.
        """
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
