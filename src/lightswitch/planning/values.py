"""What fake tensors answer: values that a planned step asks for, and results of operators seen before."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from sysconfig import get_path
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

_FLOATS, _INTEGERS, _BOOLS = (0.5, 0.0, -8.0, 8.0), (1, 0, 2, 3), (True, False, True, False)  # the first is the guess
_MOST_ELEMENTS = 2**20  # of a tensor whose true values are computed
_PATIENCE, _MOST_ASKED = 100, 1000  # times that one place of one module asks in a micro batch
_INDEX, _SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_ENGINE, _SIMULATION = str(Path(__file__).parents[1]), "lightswitch.planning.simulation"
_PASSED = ("torch.", "lightswitch.")
_INSTALLED = tuple(str(Path(get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Values:
    """Values of fake tensors, for the operators and methods that go by them.

    What follows from the batch alone, as the longest of its lengths, is computed beside the step. Of anything else, a
    float is 0.5, an integer 1, and a bool True, but for what no finite number is: `isnan`, or `x > 3` of the 0.5. What
    has as many elements as values say has the most that it can have: `nonzero`, `unique`, `x[mask]`. A place that asks
    more than a hundred times is given 0, or the other bool, every second time: it may be a loop that ends by a value.

    Args:
        where: returns the path of the module at work.

    Attributes:
        guessed: how often each place of the user's code has asked for what was guessed, in the micro batch that asked
            most.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.guessed: Counter[str] = Counter()
        self._where = where
        self._asked: Counter[tuple[str, str]] = Counter()
        self._known = _Notes()  # a real tensor, by the fake one that stands for it
        self._likely = _Notes()  # what an element is at each of the guesses, by the fake tensor

    def restart(self) -> None:
        """Begin a micro batch."""
        self._asked.clear()

    def know(self, tensor: Tensor, real: Tensor) -> None:
        """Note the values of a tensor of the batch."""
        if real.numel() <= _MOST_ELEMENTS and real.layout == torch.strided:
            with _disable_current_modes():
                self._known.put(tensor, real.detach().clone())

    def read(self, tensor: Tensor, method: Callable[[Tensor], Any]) -> Any:
        """Return what a method that reads values returns of a fake tensor."""
        is_other = self._ask([tensor])
        with _disable_current_modes():
            return method(self._real(tensor, is_other))

    def answer(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator returns that goes by values."""
        is_size = torch.Tag.data_dependent_output not in func.tags
        is_other = self._ask(_tensors(args[1] if func in (_INDEX, _SELECT, _PACK) else (args, kwargs)))
        if func is _INDEX:
            return func(args[0], [one for index in args[1] for one in self._places(index, is_other)])
        if func is _SELECT:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's
            times = shape.numel() // max(1, args[1].numel())
            return args[0].new_empty(times * self._count(args[1], is_other))
        distinct = "unique" in func._opname
        with _disable_current_modes():
            is_largest = is_size and not is_other
            real = partial(self._sized, distinct) if is_largest else partial(self._real, is_other=is_other)
            out = func(*tree_map_only(FakeTensor, real, args), **tree_map_only(FakeTensor, real, dict(kwargs)))
        fake = tree_map_only(Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), out)
        return (fake[0], out[1]) if func is _PACK else fake  # as torch reads the sizes in C++

    def follow(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]) -> None:
        """Work out what is known of the tensors that an operator has made."""
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
        """Return what an element of a tensor is at each of the guesses."""
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
        """Return values of which an operator makes the most that it can."""
        if tensor in self._known or not (distinct or tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
            return self._real(tensor, is_other=False)
        if tensor.dtype == torch.bool and not distinct:
            return self._element(tensor).any().expand(tensor.shape)
        return torch.arange(1, 1 + tensor.numel()).to(tensor.dtype).view(tensor.shape)

    def _places(self, index: Tensor | None, is_other: bool) -> list[Tensor | None]:
        """Return what a mask stands for in an index: a tensor of places for each of its dimensions."""
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
        """Count a question, unless its answer is known; return whether it has been asked too often."""
        if self._are_known(given):
            return False
        place = _place()
        self._asked[place, self._where()] += 1
        times = self._asked[place, self._where()]
        if times > _MOST_ASKED:
            raise NeedsValues(f"asks for values at {place} more than {_MOST_ASKED} times, as a loop that ends by one")
        self.guessed[place] = max(self.guessed[place], sum(n for (at, _), n in self._asked.items() if at == place))
        return times > _PATIENCE and times % 2 == 0


class _Notes:
    """Tensors that are noted of others, as long as these are there."""

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


def let_be_asked(values: Values | None) -> None:
    """Have fake tensors answer those of their methods that read values in C++; with None, as before."""
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
    """Return the file and line of the user's code that asks, or else of the library's outside of torch."""
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None and frame.f_globals["__name__"] != _SIMULATION:
        if not _is_installed(frame.f_code.co_filename):
            found = frame
            break
        if found is None and not frame.f_globals["__name__"].startswith(_PASSED):
            found = frame
        frame = frame.f_back
    return "" if found is None else f"{shown(Path(found.f_code.co_filename))}:{found.f_lineno}"


@lru_cache
def _is_installed(file: str) -> bool:
    return file.startswith(("<", _ENGINE)) or str(Path(file).resolve()).startswith(_INSTALLED)


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
