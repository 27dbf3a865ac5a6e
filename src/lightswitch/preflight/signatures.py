"""Signatures of the code that a config names, read from its source. Nothing is imported, not even torch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from lightswitch.preflight.sources import (
    Order,
    Scope,
    bound_names,
    constant,
    definition,
    find,
    resolution_order,
    text_of,
)

_SIMPLE = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}


@dataclass(frozen=True)
class Parameter:
    """Parameter of a function. Its annotation is resolved only on access, because that may parse many modules.

    Attributes:
        name: of the parameter.
        default: source text of the default; None if there is none.
    """

    name: str
    default: str | None
    _scope: Scope
    _annotation: ast.expr | None
    _default: ast.expr | None = None

    @property
    def value(self) -> object:
        """Value of the default if the source shows it, as `64`, `2 * 32` or a module's constant; None if not."""
        return constant(self._scope, self._default)

    @property
    def annotation(self) -> str:
        """Source text of its annotation."""
        return "" if self._annotation is None else ast.unparse(self._annotation).strip("'")

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
        try:
            accepted = _accepted(self._scope, self._annotation)
        except RecursionError:  # as of `Tree = Union[int, "Tree"]`
            return _ANYTHING
        return _union([accepted, _NOTHING]) if self.default == "None" else accepted  # as in `limit: int = None`


@dataclass(frozen=True)
class Signature:
    """Parameters of a function or of a class's constructor.

    Attributes:
        parameters: by name, in order.
        required: names of the parameters without a default.
        open_ended: whether it also accepts any other keyword (**kwargs).
        docstrings: of the constructor, its class and its bases, nearest first; or of the function.
        passed_on: names of those that a constructor passes on to a base's.
    """

    parameters: dict[str, Parameter]
    required: frozenset[str]
    open_ended: bool
    docstrings: tuple[str, ...]
    passed_on: frozenset[str] = frozenset()


@functools.cache
def signature(target: str) -> Signature | None:
    """Return the signature of the class or function at a dotted path; None if its source does not show it.

    Raises:
        LookupError: the path has no module, the module does not exist, or it does not define the name.
    """
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError(f"it names no module; expected MODULE.CLASS, as in {name or 'my'}.Module")
    found = find(module, name)
    if found is None:
        return None
    scope, node = found
    if isinstance(node, ast.ClassDef):
        return _of_constructor(resolution_order(scope, node))
    decorators = [ast.unparse(one) for one in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
    is_bound = any(name.endswith("classmethod") for name in decorators)  # Python gives it the class
    return _of_function(scope, node, skip=is_bound)


def _of_constructor(order: Order) -> Signature | None:
    """Return the signature of the first constructor of a class and its ancestors, with what it passes on to the next.

    It stays open-ended: the source does not show for certain which of its **kwargs are left for the next one.
    """
    for index, one in enumerate(order):
        if one is None:
            return None
        of, ancestor = one
        if (item := bound_names(ancestor.body).get("__init__")) is not None:
            own = _of_function(of, item, skip=1, classes=order)
            call = _passing_on(item)
            passed = _of_constructor(order[index + 1 :]) if call else None
            if own is None or passed is None or call is None:
                return own
            given = own.parameters.keys() | {keyword.arg for keyword in call.keywords}
            taken = {name: of_base for name, of_base in passed.parameters.items() if name not in given}
            docstrings = tuple(dict.fromkeys((*own.docstrings, *passed.docstrings)))
            return Signature({**own.parameters, **taken}, own.required, True, docstrings, frozenset(taken))
        if ancestor.decorator_list:  # it may make the constructor, as dataclass does
            return None
    return None


def _passing_on(constructor: ast.stmt) -> ast.Call | None:
    """Return the call of `super().__init__` to which a constructor passes its **kwargs, and nothing by place."""
    kwargs = constructor.args.kwarg if isinstance(constructor, ast.FunctionDef) else None
    for call in ast.walk(constructor):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and not call.args:
            unpacked = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
            if kwargs is not None and kwargs.arg in unpacked:
                return call
    return None


def _of_function(
    scope: Scope, node: ast.stmt, skip: int, classes: Iterable[tuple[Scope, ast.ClassDef] | None] = ()
) -> Signature | None:
    if not isinstance(node, ast.FunctionDef):
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    without = len(positional) - len(node.args.defaults)
    arguments = [*positional, *node.args.kwonlyargs][skip:]
    defaults = [*[None] * without, *node.args.defaults, *node.args.kw_defaults][skip:]
    parameters = [
        Parameter(argument.arg, None if default is None else ast.unparse(default), scope, argument.annotation, default)
        for argument, default in zip(arguments, defaults, strict=True)
    ]
    return Signature(
        parameters={parameter.name: parameter for parameter in parameters},
        required=frozenset(parameter.name for parameter in parameters if parameter.default is None),
        open_ended=node.args.kwarg is not None,
        docstrings=tuple(filter(None, (ast.get_docstring(node), *(_docstring(*one) for one in classes if one)))),
    )


def _docstring(scope: Scope, node: ast.ClassDef) -> str:
    """Return a class's docstring, which its module may also assemble and assign, as for torch's optimizers."""
    if docstring := ast.get_docstring(node):
        return docstring
    assigned = scope.names.get(f"{node.name}.__doc__")
    return text_of(scope, assigned.value) if isinstance(assigned, ast.Assign) else ""


_Accepted = tuple[frozenset[type] | None, frozenset[object] | None]
_ANYTHING: _Accepted = (None, None)
_NOTHING: _Accepted = (frozenset({type(None)}), frozenset())


def _accepted(scope: Scope, node: ast.expr | None) -> _Accepted:
    """Return the types and the literals that an annotation allows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:  # a description
            return _ANYTHING
    if isinstance(node, ast.Constant) and node.value is None:
        return _NOTHING
    if isinstance(node, ast.Name):
        return _accepted_name(scope, node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_accepted(scope, node.left), _accepted(scope, node.right)])
    if isinstance(node, ast.Subscript):
        return _accepted_subscript(scope, node)
    return _ANYTHING


def _accepted_name(scope: Scope, node: ast.Name) -> _Accepted:
    if node.id in _SIMPLE:
        return frozenset({_SIMPLE[node.id]}), frozenset()
    found = definition(scope, node)
    if found is not None and isinstance(found[1], ast.Assign):
        return _accepted(found[0], found[1].value)
    return _ANYTHING


def _accepted_subscript(scope: Scope, node: ast.Subscript) -> _Accepted:
    name = ast.unparse(node.value).rpartition(".")[2]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        try:
            return frozenset(), frozenset(map(ast.literal_eval, inner))
        except (ValueError, TypeError):  # a member of an Enum
            return _ANYTHING
    if name in ("list", "List", "Sequence", "tuple", "Tuple"):
        return frozenset({list}), frozenset()
    if name in ("dict", "Dict", "Mapping"):
        return frozenset({dict}), frozenset()
    if name in ("Optional", "Union"):
        parts = [_accepted(scope, part) for part in inner]
        return _union([*parts, _NOTHING] if name == "Optional" else parts)
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
