"""Signatures of the code that a config names, which `inspect` reads once the code is imported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_NONE = inspect.Parameter.empty
_SIMPLE = (int, float, str, bool, type(None))
_IN_A_CONFIG = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Parameter:
    """Parameter of a function.

    Attributes:
        name: of the parameter.
        value: its default; `inspect.Parameter.empty` if there is none.
        annotation: text of its annotation; empty if there is none.
        hint: its annotation, evaluated; its text if a name in it is not bound in its module.
    """

    name: str
    value: object
    annotation: str
    hint: object

    @property
    def default(self) -> str | None:
        """Text of the default; None if there is none."""
        if self.value is _NONE:
            return None
        return str(getattr(self.value, "__name__", repr(self.value)))  # the repr of a function has its address

    @property
    def kinds(self) -> frozenset[type] | None:
        """Types that its annotation allows; None if it allows anything."""
        return self._accepted[0]

    @property
    def literals(self) -> frozenset[object] | None:
        """Values of typing.Literal that its annotation allows; None if it allows anything."""
        return self._accepted[1]

    @functools.cached_property
    def _accepted(self) -> _Accepted:
        accepted = _accepted(self.hint)
        return _union([accepted, _accepted(type(None))]) if self.value is None else accepted  # `limit: int = None`


@dataclass(frozen=True)
class Signature:
    """Parameters of a function or of a class's constructor.

    Attributes:
        parameters: by name, in order.
        required: names of the parameters without a default.
        open_ended: whether it also accepts any other keyword (**kwargs).
        docstrings: of the constructor, its class and its bases, nearest first; or of the function.
        passed_on: names of those that a constructor with **kwargs may pass on to a base's.
    """

    parameters: dict[str, Parameter]
    required: frozenset[str]
    open_ended: bool
    docstrings: tuple[str, ...]
    passed_on: frozenset[str] = frozenset()


@functools.cache
def signature(target: str) -> Signature | None:
    """Return the signature of the class or function at a dotted path.

    None if importing it fails, which fails again, and says why, when it is made; or if it is not written in Python.

    Raises:
        LookupError: the path has no module, the module does not exist, or it does not define the name.
    """
    found = _located(target)
    try:
        return _of_class(found) if isinstance(found, type) else _of_functions([found], 0, [found.__doc__])
    except (TypeError, ValueError):
        return None


def _located(target: str) -> Any:
    """Return what a dotted path names; None if importing its module fails."""
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError(f"it names no module; expected MODULE.CLASS, as in {name or 'my'}.Module")
    try:
        owner = _imported(module)
        return owner and getattr(owner, name)
    except AttributeError:
        raise LookupError(f"{module} has no {name}") from None


def _imported(path: str) -> Any:
    """Return the module at a dotted path, or the class in a module; None if the import fails."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            return None  # a module that it imports
    except SyntaxError as error:
        raise LookupError(f"Python can't read {error.filename}: {error}") from error
    except Exception:
        return None
    try:
        return _located(path)
    except LookupError:
        raise LookupError(f"there is no module {path}") from None


def _of_class(found: type) -> Signature:
    classes = [one for one in found.__mro__ if one is not object]
    constructors = [vars(one)["__init__"] for one in classes if "__init__" in vars(one)]
    docstrings = [one.__doc__ for one in (*constructors[:1], *classes)]
    return _of_functions(constructors or [found], skip=1 if constructors else 0, docstrings=docstrings)


def _of_functions(functions: Sequence[Callable[..., Any]], skip: int, docstrings: Sequence[str | None]) -> Signature:
    """Return the signature of the first function, with the parameters of each next one that may get its **kwargs.

    Args:
        skip: number of parameters that Python gives, as `self`.
    """
    own, is_open_ended = _parameters(functions[0], skip)
    found, goes_on = own, is_open_ended
    for function in functions[1:]:
        if goes_on:
            of_base, goes_on = _parameters(function, skip)
            found = found | {name: one for name, one in of_base.items() if name not in found}
    return Signature(
        parameters=found,
        required=frozenset(name for name, one in own.items() if one.default is None),
        open_ended=is_open_ended,
        docstrings=tuple(dict.fromkeys(inspect.cleandoc(one) for one in docstrings if one)),
        passed_on=frozenset(found.keys() - own.keys()),
    )


def _parameters(function: Callable[..., Any], skip: int) -> tuple[dict[str, Parameter], bool]:
    """Return the parameters of a function that a config can give, and whether it takes any other keyword."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    every = [*inspect.signature(function).parameters.values()][skip:]
    given = {one.name: _parameter(one, names) for one in every if one.kind in _IN_A_CONFIG}
    return given, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in every)


def _parameter(of: inspect.Parameter, names: dict[str, Any]) -> Parameter:
    if of.annotation is _NONE:
        return Parameter(of.name, of.default, "", None)
    if not isinstance(of.annotation, str):
        return Parameter(of.name, of.default, inspect.formatannotation(of.annotation), of.annotation)
    try:
        hint = eval(of.annotation, names)
    except Exception:  # a description, or a name that is bound for type checkers alone
        hint = of.annotation
    return Parameter(of.name, of.default, of.annotation, hint)


_Accepted = tuple[frozenset[type] | None, frozenset[object] | None]
_ANYTHING: _Accepted = (None, None)


def _accepted(hint: object) -> _Accepted:
    """Return the types and the literals that an annotation allows."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and hint in _SIMPLE:
        return frozenset({hint}), frozenset()
    if origin in (Union, UnionType):
        return _union([_accepted(one) for one in inner])
    if origin is Literal:
        return frozenset(), frozenset(inner)
    if origin in (list, tuple, Sequence):
        return frozenset({list}), frozenset()
    if origin in (dict, Mapping):
        return frozenset({dict}), frozenset()
    return _ANYTHING


def _union(parts: list[_Accepted]) -> _Accepted:
    kinds: set[type] = set()
    literals: set[object] = set()
    for part_kinds, part_literals in parts:
        if part_kinds is None or part_literals is None:
            return _ANYTHING
        kinds |= part_kinds
        literals |= part_literals
    return frozenset(kinds), frozenset(literals)
