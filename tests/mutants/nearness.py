"""The files of tests in the order of their nearness to a module: what imports it first."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def by_nearness(checkout: Path, mutated: Path, folders: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files of tests in some folders in two parts: those that import a module, or lie in the folder of its
    package's name, and the others, of which those come first that import what imports it."""
    modules = {_name(path.relative_to(checkout)): path for path in _code(checkout)}
    importers = defaultdict(set)
    for name, path in modules.items():
        for imported in _imported(path, modules):
            importers[imported].add(name)
    distance = {_name(mutated): 0}
    queue = [_name(mutated)]
    for name in queue:
        for importer in sorted(importers[name] - {*distance}):
            distance[importer] = distance[name] + 1
            queue.append(importer)

    def away(path: Path) -> tuple[float, str]:
        found = distance.get(_name(path), 99)
        return (1.5 if found > 1 and path.parent.name in mutated.parts else found), str(path)

    tests = (path for folder in folders for path in checkout.glob(f"{folder}/**/test_*.py"))
    ranked = sorted(away(path.relative_to(checkout)) for path in tests)
    return [path for far, path in ranked if far < 2], [path for far, path in ranked if far >= 2]


def _code(checkout: Path) -> list[Path]:
    return sorted(path for folder in ("src", "tests", "benchmarks") for path in checkout.glob(f"{folder}/**/*.py"))


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(part for part in parts[parts[0] == "src" :] if part != "__init__")


def _imported(path: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & {*modules} or {node.module}
    return found & {*modules}
