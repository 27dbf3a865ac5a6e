"""Signatures of the code that a config names, read from its source. Nothing is imported, not even torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

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
    _scope: _Scope
    _annotation: ast.expr | None

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
        return _accepted(self._scope, self._annotation)


@dataclass(frozen=True)
class Signature:
    """Parameters of a function or of a class's constructor.

    Attributes:
        parameters: by name, in order.
        required: names of the parameters without a default.
        open_ended: whether it also accepts any other keyword (**kwargs).
        docstrings: of the constructor, its class and its bases, nearest first; or of the function.
    """

    parameters: dict[str, Parameter]
    required: frozenset[str]
    open_ended: bool
    docstrings: tuple[str, ...]


@functools.cache
def signature(target: str) -> Signature | None:
    """Return the signature of the class or function at a dotted path; None if its source does not show it.

    Raises:
        LookupError: the path has no module, the module does not exist, or it does not define the name.
    """
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError(f"it names no module; expected MODULE.CLASS, as in {name or 'my'}.Module")
    found = _find(module, name)
    if found is None:
        return None
    scope, node = found
    return _of_class(scope, node) if isinstance(node, ast.ClassDef) else _of_function(scope, node, skip=0)


@dataclass(frozen=True)
class _Scope:
    """Top level of a module, with the names that it binds."""

    module: str
    path: Path

    @functools.cached_property
    def names(self) -> dict[str, ast.stmt]:
        return _bound_names(ast.parse(self.path.read_text(encoding="utf-8")).body)

    @property
    def package(self) -> str:
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def _bound_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: node for alias in node.names})
        elif isinstance(node, ast.Assign):
            names.update({ast.unparse(t): node for t in node.targets if isinstance(t, ast.Name | ast.Attribute)})
        elif isinstance(node, ast.If | ast.Try):
            names.update(_bound_names(node.body))
    return names


@functools.cache
def _scope(module: str) -> _Scope | None:
    """Return a module's top level; None if it has no Python source.

    Raises:
        LookupError: there is no such module.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)  # for a top-level name, this imports nothing
    for part in rest:
        if spec is None:
            break
        # by the last name only: for the full one, Python would look up the parent of a folder without __init__.py
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    if spec is None:
        raise LookupError(f"there is no module {module}")
    origin = spec.origin or ""
    return _Scope(module, Path(origin)) if origin.endswith(".py") else None


def _find(module: str, name: str, depth: int = 0) -> tuple[_Scope, ast.stmt] | None:
    """Return the definition of a name, following imports from other modules."""
    scope = _scope(module)
    if scope is None or depth > 8:
        return None
    node = scope.names.get(name)
    if isinstance(node, ast.ImportFrom):
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        return _find(_absolute(scope, node), original, depth + 1)
    if node is None:
        if any(key == "*" for key in scope.names) or "__getattr__" in scope.names:
            return None
        raise LookupError(f"{module} has no {name}")
    return scope, node


def _absolute(scope: _Scope, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = scope.package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _of_class(scope: _Scope, node: ast.ClassDef) -> Signature | None:
    order = _resolution_order(scope, node)
    for of, ancestor in order:
        for item in ancestor.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return _of_function(of, item, skip=1, classes=order)
        if any("dataclass" in ast.unparse(decorator) for decorator in ancestor.decorator_list):
            return None
    return None


def _resolution_order(scope: _Scope, node: ast.ClassDef) -> list[tuple[_Scope, ast.ClassDef]]:
    """Return a class and its ancestors in Python's order: a shared ancestor comes after the last of its subclasses."""
    found: list[tuple[_Scope, ast.ClassDef]] = [(scope, node)]
    for base in node.bases:
        named = _named(scope, base)
        if named is not None and isinstance(named[1], ast.ClassDef):
            inherited = _resolution_order(named[0], named[1])
            again = {id(ancestor) for _, ancestor in inherited}
            found = [pair for pair in found if id(pair[1]) not in again] + inherited
    return found


def _of_function(
    scope: _Scope, node: ast.stmt, skip: int, classes: list[tuple[_Scope, ast.ClassDef]] | None = None
) -> Signature | None:
    if not isinstance(node, ast.FunctionDef):
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    without = len(positional) - len(node.args.defaults)
    arguments = [*positional, *node.args.kwonlyargs][skip:]
    defaults = [*[None] * without, *node.args.defaults, *node.args.kw_defaults][skip:]
    parameters = [
        Parameter(argument.arg, None if default is None else ast.unparse(default), scope, argument.annotation)
        for argument, default in zip(arguments, defaults, strict=True)
    ]
    return Signature(
        parameters={parameter.name: parameter for parameter in parameters},
        required=frozenset(parameter.name for parameter in parameters if parameter.default is None),
        open_ended=node.args.kwarg is not None,
        docstrings=tuple(filter(None, (ast.get_docstring(node), *(_docstring(*one) for one in classes or ())))),
    )


def _docstring(scope: _Scope, node: ast.ClassDef) -> str:
    """Return a class's docstring, which its module may also assemble and assign, as for torch's optimizers."""
    if docstring := ast.get_docstring(node):
        return docstring
    assigned = scope.names.get(f"{node.name}.__doc__")
    return _text(scope, assigned.value) if isinstance(assigned, ast.Assign) else ""


def _text(scope: _Scope, node: ast.expr) -> str:
    """Return the value of a string expression built from constants; an empty string for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(scope, part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text(scope, left) + _text(scope, right)
        case ast.FormattedValue(value=inner):
            return _text(scope, inner)
        case ast.Name():
            of, found = _named(scope, node) or (scope, None)
            return _text(of, found.value) if isinstance(found, ast.Assign) else ""
    return ""


_Accepted = tuple[frozenset[type] | None, frozenset[object] | None]
_ANYTHING: _Accepted = (None, None)


def _accepted(scope: _Scope, node: ast.expr | None) -> _Accepted:
    """Return the types and the literals that an annotation allows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.Constant) and node.value is None:
        return frozenset({type(None)}), frozenset()
    if isinstance(node, ast.Name):
        return _accepted_name(scope, node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_accepted(scope, node.left), _accepted(scope, node.right)])
    if isinstance(node, ast.Subscript):
        return _accepted_subscript(scope, node)
    return _ANYTHING


def _accepted_name(scope: _Scope, node: ast.Name) -> _Accepted:
    if node.id in _SIMPLE:
        return frozenset({_SIMPLE[node.id]}), frozenset()
    found = _named(scope, node)
    if found is not None and isinstance(found[1], ast.Assign):
        return _accepted(found[0], found[1].value)
    return _ANYTHING


def _accepted_subscript(scope: _Scope, node: ast.Subscript) -> _Accepted:
    name = ast.unparse(node.value).rpartition(".")[2]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        values = frozenset(c.value for c in inner if isinstance(c, ast.Constant))
        return frozenset(), values
    if name in ("list", "List", "Sequence", "tuple", "Tuple"):
        return frozenset({list}), frozenset()
    if name in ("dict", "Dict", "Mapping"):
        return frozenset({dict}), frozenset()
    if name in ("Optional", "Union"):
        parts = [_accepted(scope, part) for part in inner]
        return _union([*parts, (frozenset({type(None)}), frozenset())] if name == "Optional" else parts)
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


def _named(scope: _Scope, node: ast.expr) -> tuple[_Scope, ast.stmt] | None:
    if not isinstance(node, ast.Name) or node.id not in scope.names:
        return None
    bound = scope.names[node.id]
    if isinstance(bound, ast.ImportFrom) and _absolute(scope, bound) in sys.stdlib_module_names:
        return None  # a class such as Path or timedelta, whose file takes longer to parse than all others
    try:
        return _find(scope.module, node.id)
    except LookupError:
        return None
