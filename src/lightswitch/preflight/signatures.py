"""Signatures of the code that a config names, read from its source. Nothing is imported, not even torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

_FARTHEST = 8  # followed from one module to the next, and names from one value to the next
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
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
    _default: ast.expr | None = None

    @property
    def value(self) -> object:
        """Value of the default if the source shows it, as `64`, `2 * 32` or a module's constant; None if not."""
        return _constant(self._scope, self._default)

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
        accepted = _accepted(self._scope, self._annotation)
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
    found = _find(module, name)
    if found is None:
        return None
    scope, node = found
    if isinstance(node, ast.ClassDef):
        return _of_constructor(_resolution_order(scope, node))
    decorators = [ast.unparse(one) for one in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
    is_bound = any(name.endswith("classmethod") for name in decorators)  # Python gives it the class
    return _of_function(scope, node, skip=is_bound)


@dataclass(frozen=True)
class _Scope:
    """Top level of a module, with the names that it binds."""

    module: str
    path: Path

    @functools.cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @functools.cached_property
    def names(self) -> dict[str, ast.stmt]:
        return _bound_names(self._tree.body)

    def binds_once(self, name: str) -> bool:
        """Return whether one statement alone binds a name, also in classes, functions and conditions."""
        return [ast.unparse(node) for node in ast.walk(self._tree) if _is_bound(node)].count(name) == 1

    @property
    def package(self) -> str:
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def _bound_names(body: Sequence[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the statements that bind names, by name; of several branches, the first that binds it."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update({alias.asname or alias.name.partition(".")[0]: node for alias in node.names})
        else:
            names.update({ast.unparse(target): node for target in ast.walk(node) if _is_bound(target)})
            for branch in reversed([*_branches(node)]):
                names.update(_bound_names(branch))
    return names


def _branches(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a compound statement: of if, try, with, for, while or match; none of a simple one."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        for item in value if isinstance(value, list) else ():
            if isinstance(item, ast.ExceptHandler | ast.match_case):
                yield item.body


def _is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)


def _is_module(name: str) -> bool:
    try:
        _scope(name)
    except LookupError:
        return False
    return True


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
    """Return the definition of a name in a module or a class, following imports from other modules.

    None if it may be there, but the source does not show its definition.
    """
    try:
        scope = _scope(module)
    except LookupError:
        return _find_member(module, name, depth)
    if scope is None or depth > _FARTHEST:
        return None
    node = scope.names.get(name)
    if isinstance(node, ast.ImportFrom):
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        try:
            return _find(_absolute(scope, node), original, depth + 1)
        except LookupError:  # as of a package that is optional
            return None
    if node is None:
        if any(key == "*" for key in scope.names) or "__getattr__" in scope.names or _is_module(f"{module}.{name}"):
            return None
        raise LookupError(f"{module} has no {name}")
    return scope, node


def _find_member(path: str, name: str, depth: int) -> tuple[_Scope, ast.stmt] | None:
    """Return the definition of a class's method or inner class."""
    module, _, owner = path.rpartition(".")
    absent = LookupError(f"there is no module {path}")
    if not module:
        raise absent
    try:
        found = _find(module, owner, depth)
    except LookupError:
        raise absent from None
    if found is None and not owner[:1].isupper():  # by its name no class, which `import *` may bring
        raise absent
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    order = _resolution_order(found[0], found[1])
    for ancestor in order:
        if ancestor is None:
            return None
        if (node := _bound_names(ancestor[1].body).get(name)) is not None:
            return ancestor[0], node
    raise LookupError(f"{path} has no {name}")


def _absolute(scope: _Scope, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = scope.package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


_Order = list[tuple[_Scope, ast.ClassDef] | None]


def _of_constructor(order: _Order) -> Signature | None:
    """Return the signature of the first constructor of a class and its ancestors, with what it passes on to the next.

    It stays open-ended: the source does not show for certain which of its **kwargs are left for the next one.
    """
    for index, one in enumerate(order):
        if one is None:
            return None
        of, ancestor = one
        for item in ancestor.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                own = _of_function(of, item, skip=1, classes=order)
                call = _passing_on(item)
                passed = _of_constructor(order[index + 1 :]) if call else None
                if own is None or passed is None or call is None:
                    return own
                given = own.parameters.keys() | {keyword.arg for keyword in call.keywords}
                taken = {name: of_base for name, of_base in passed.parameters.items() if name not in given}
                docstrings = tuple(dict.fromkeys((*own.docstrings, *passed.docstrings)))
                return Signature({**own.parameters, **taken}, own.required, True, docstrings, frozenset(taken))
        if any("dataclass" in ast.unparse(decorator) for decorator in ancestor.decorator_list):
            return None
    return None


def _passing_on(constructor: ast.FunctionDef) -> ast.Call | None:
    """Return the call of `super().__init__` to which a constructor passes its **kwargs, and nothing by place."""
    kwargs = constructor.args.kwarg
    for call in ast.walk(constructor):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and not call.args:
            unpacked = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
            if kwargs is not None and kwargs.arg in unpacked:
                return call
    return None


def _resolution_order(scope: _Scope, node: ast.ClassDef, of: tuple[ast.stmt, ...] = ()) -> _Order:
    """Return a class and its ancestors in Python's order: a shared ancestor comes after the last of its subclasses.

    None stands for an ancestor whose source is not found. Those of the standard library, such as ABC, are left out.
    """
    found: _Order = [(scope, node)]
    for base in node.bases:
        named = _named(scope, base)
        if named is not None and isinstance(named[1], ast.ClassDef) and named[1] not in (node, *of):
            inherited = _resolution_order(named[0], named[1], (node, *of))
            again = {id(one[1]) for one in inherited if one is not None}
            found = [one for one in found if one is None or id(one[1]) not in again] + inherited
        elif ast.unparse(base) != "object" and not _is_of_stdlib(scope, base):
            found.append(None)
    return found


def _of_function(
    scope: _Scope, node: ast.stmt, skip: int, classes: Iterable[tuple[_Scope, ast.ClassDef] | None] = ()
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
_NOTHING: _Accepted = (frozenset({type(None)}), frozenset())


def _accepted(scope: _Scope, node: ast.expr | None) -> _Accepted:
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


def _named(scope: _Scope, node: ast.expr) -> tuple[_Scope, ast.stmt] | None:
    """Return the definition of what an expression names, such as `Base` or `nets.Base`; None if it is not found."""
    module, name = _origin(scope, node)
    if not module or module.partition(".")[0] in sys.stdlib_module_names:
        return None  # a class such as Path or timedelta, whose file takes longer to parse than all others
    try:
        return _find(module, name)
    except LookupError:
        return None


def _is_of_stdlib(scope: _Scope, node: ast.expr) -> bool:
    return _origin(scope, node)[0].partition(".")[0] in sys.stdlib_module_names


def _origin(scope: _Scope, node: ast.expr) -> tuple[str, str]:
    """Return the module in which an expression such as `Base`, `nets.Base` or `Base[int]` is defined, and its name.

    The module is empty if no statement binds the expression's first name.
    """
    first, *rest = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).split(".")
    bound = scope.names.get(first)
    if not isinstance(bound, ast.Import | ast.ImportFrom):
        return (scope.module, first) if bound is not None and not rest else ("", first)
    alias = next(one for one in bound.names if first in (one.asname, one.name.partition(".")[0]))
    if isinstance(bound, ast.ImportFrom):
        imported = f"{_absolute(scope, bound)}.{alias.name}"
    else:
        imported = alias.name if alias.asname else first
    module, _, name = ".".join([imported, *rest]).rpartition(".")
    return module, name


def _constant(scope: _Scope, node: ast.expr | None, depth: int = 0) -> object:
    """Return the value of a constant, a name of one, or arithmetic with these; None if it is none of them."""
    if depth > _FARTHEST:  # such as SIZE = SIZE + 1
        return None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = (_constant(scope, side, depth + 1) for side in (node.left, node.right))
        if isinstance(left, int) and isinstance(right, int):
            return _ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.Name | ast.Attribute):
        of, found = _named(scope, node) or (scope, None)
        name = ast.unparse(node).rpartition(".")[2]
        if not isinstance(found, ast.Assign | ast.AnnAssign) or not of.binds_once(name):
            return None
        return _constant(of, found.value, depth + 1)
    return node.value if isinstance(node, ast.Constant) else None
