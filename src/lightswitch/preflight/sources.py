"""Definitions of names in Python source: in a module, in a class and its bases, and over imports. Nothing is imported.

A name is only said to be missing where the source shows that for certain.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

_FARTHEST = 8  # followed from one module to the next, and names from one value to the next
_BARE = ("object", "ABC", "Generic", "Protocol")  # classes without a constructor or a method to call
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Scope:
    """Top level of a module, with the names that it binds."""

    module: str
    path: Path

    @functools.cached_property
    def _source(self) -> str:
        return importlib.util.decode_source(self.path.read_bytes())  # a comment may name its encoding

    @functools.cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self._source, str(self.path))
        except (SyntaxError, ValueError) as error:
            raise LookupError(f"Python can't read {self.path}: {error}") from error

    @functools.cached_property
    def names(self) -> dict[str, ast.stmt]:
        return bound_names(self._tree.body)

    def binds_once(self, name: str) -> bool:
        """Return whether one statement alone binds a name, also in classes, functions and conditions."""
        return [ast.unparse(node) for node in ast.walk(self._tree) if _is_bound(node)].count(name) == 1

    def may_bind(self, name: str) -> bool:
        """Return whether code may bind a name that no statement of its top level does, as `globals()[name] = …`."""
        others = r"__getattr__|globals|exec|sys\.modules"
        return re.search(rf"\b({re.escape(name)}|{others})\b|\bimport \*", self._source) is not None

    @property
    def package(self) -> str:
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def bound_names(body: Sequence[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the statements that bind names, by name; of several branches, the first that binds it.

    If several define it, which one does is not known, so that it is the statement with the branches.
    """
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, _Defined):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update({alias.asname or alias.name.partition(".")[0]: node for alias in node.names})
        else:
            names.update({ast.unparse(target): node for target in ast.walk(node) if _is_bound(target)})
            branches = [bound_names(branch) for branch in _branches(node)]
            for branch in reversed(branches):
                names.update(branch)
            defined = Counter(name for branch in branches for name, one in branch.items() if isinstance(one, _Defined))
            names.update(dict.fromkeys((name for name, count in defined.items() if count > 1), node))
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
def _scope(module: str) -> Scope | None:
    """Return a module's top level; None if it has no Python source.

    Raises:
        LookupError: there is no such module.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)  # for a top-level name, this imports nothing
    except ValueError:  # `__main__` is the script, whose classes need no module
        return None
    for part in rest:
        if spec is None:
            break
        # by the last name only: for the full one, Python would look up the parent of a folder without __init__.py
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    if spec is None:
        raise LookupError(f"there is no module {module}")
    origin = spec.origin or ""
    return Scope(module, Path(origin)) if origin.endswith(".py") else None


def find(module: str, name: str, depth: int = 0) -> tuple[Scope, ast.stmt] | None:
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
            return find(_absolute(scope, node), original, depth + 1)
        except LookupError:  # as of a package that is optional
            return None
    if node is None:
        if scope.may_bind(name) or _is_module(f"{module}.{name}"):
            return None
        raise LookupError(f"{module} has no {name}")
    return scope, node


def _find_member(path: str, name: str, depth: int) -> tuple[Scope, ast.stmt] | None:
    """Return the definition of a class's method or inner class."""
    module, _, owner = path.rpartition(".")
    absent = LookupError(f"there is no module {path}")
    if not module:
        raise absent
    try:
        found = find(module, owner, depth)
    except LookupError:
        raise absent from None
    if found is None and not owner[:1].isupper() and not _binds(module, owner):
        raise absent  # by its name no class, which `import *` may bring
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    order = resolution_order(found[0], found[1])
    for ancestor in order:
        if ancestor is None:
            return None
        if (node := bound_names(ancestor[1].body).get(name)) is not None:
            return ancestor[0], node
    raise LookupError(f"{path} has no {name}")


def _binds(module: str, name: str) -> bool:
    """Return whether a module binds a name, or has no source that shows whether it does."""
    scope = _scope(module) if _is_module(module) else None
    return scope is None or name in scope.names


def _absolute(scope: Scope, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = scope.package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


Order = list[tuple[Scope, ast.ClassDef] | None]


def resolution_order(scope: Scope, node: ast.ClassDef, of: tuple[ast.stmt, ...] = ()) -> Order:
    """Return a class and its ancestors in Python's order: a shared ancestor comes after the last of its subclasses.

    None stands for an ancestor whose source is not found, or of the standard library. Bare ones, as ABC, are left out.

    Args:
        of: classes whose order asks for this one; a name that is bound again may be its own base's.
    """
    found: Order = [(scope, node)]
    for base in node.bases:
        named = definition(scope, base)
        if named is not None and isinstance(named[1], ast.ClassDef) and named[1] not in (node, *of):
            inherited = resolution_order(named[0], named[1], (node, *of))
            again = {id(one[1]) for one in inherited if one is not None}
            found = [one for one in found if one is None or id(one[1]) not in again] + inherited
        elif _origin(scope, base)[1] not in _BARE:
            found.append(None)
    return found


def definition(scope: Scope, node: ast.expr) -> tuple[Scope, ast.stmt] | None:
    """Return the definition of what an expression names, such as `Base` or `nets.Base`; None if it is not found."""
    module, name = _origin(scope, node)
    if not module or module.partition(".")[0] in sys.stdlib_module_names:
        return None  # a class such as Path or timedelta, whose file takes longer to parse than all others
    try:
        return find(module, name)
    except LookupError:
        return None


def _origin(scope: Scope, node: ast.expr) -> tuple[str, str]:
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


def constant(scope: Scope, node: ast.expr | None, depth: int = 0) -> object:
    """Return the value of a constant, a name of one, or arithmetic with these; None if it is none of them."""
    if depth > _FARTHEST:  # such as SIZE = SIZE + 1
        return None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = (constant(scope, side, depth + 1) for side in (node.left, node.right))
        if isinstance(left, int) and isinstance(right, int):
            return _ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.Name | ast.Attribute):
        of, found = definition(scope, node) or (scope, None)
        name = ast.unparse(node).rpartition(".")[2]
        if not isinstance(found, ast.Assign | ast.AnnAssign) or not of.binds_once(name):
            return None
        return constant(of, found.value, depth + 1)
    return node.value if isinstance(node, ast.Constant) else None


def text_of(scope: Scope, node: ast.expr) -> str:
    """Return the value of a string expression built from constants; an empty string for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(scope, part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return text_of(scope, left) + text_of(scope, right)
        case ast.FormattedValue(value=inner):
            return text_of(scope, inner)
        case ast.Name():
            of, found = definition(scope, node) or (scope, None)
            return text_of(of, found.value) if isinstance(found, ast.Assign) else ""
    return ""
