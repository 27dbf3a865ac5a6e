"""What a test types, read from its source: with the fixtures, functions and constants of its file that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.engine.conftest import CHECKOUT

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def typed_by(file: str, test: str) -> str:
    """Return the source of all that a test of a file in tests is made of, and the choices of experiments it names.

    Raises:
        KeyError: the file has no such test.
    """
    found, asked = dict[str, str](), [test]
    definitions = _definitions(CHECKOUT / "tests" / file)
    definitions[test]  # it is there
    while asked:
        name = asked.pop()
        if name in definitions and name not in found:
            found[name], names = definitions[name]
            asked += names
    text = "\n".join(found.values())
    return "\n".join([text, *map(_choices, re.findall(r"experiment=(\w+)", text))])


@cache
def _definitions(path: Path) -> dict[str, tuple[str, set[str]]]:
    """Return the source of each name that a file defines, decorators included, and the names that are in it."""
    source = path.read_text()
    lines = source.splitlines()
    found: dict[str, tuple[str, set[str]]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, Definition):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            names |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}  # fixtures
            found |= dict.fromkeys(_defined(node), ("\n".join(lines[first - 1 : node.end_lineno]), names))
    return found


def _defined(node: Definition) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _choices(experiment: str) -> str:
    text = (CHECKOUT / f"conf/experiment/{experiment}.yaml").read_text()
    return " ".join(f"{group}={choice}" for group, choice in re.findall(r"override /(\w+): (\w+)", text))
