"""The packages of the engine, their lines and their imports, for docs/architecture.md: read from the sources.

python -m tests.engine.tables.house             # the table and docs/images/house.svg, of the checkout
python -m tests.engine.tables.house --at COMMIT  # prints the lines of a commit; --draw FILE draws its imports
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engine.conftest import CHECKOUT
from tests.engine.tables import documents
from tests.engine.tables.drawings import FOLDER, MARGIN, WIDTH, Drawing
from tests.engine.test_layout import PACKAGES, TOOLS

BEFORE = "0ddfbcd"  # before the engine was distilled
_LEFT, _TOP, _CELL = 136, 48, 12.5


@dataclass(frozen=True)
class Package:
    """A package of the engine, or a file beside the packages.

    Attributes:
        lines: of code, of each file: none that is blank, a comment or a docstring.
        imports: names of other packages, wherever in a file they are imported.
    """

    name: str
    lines: list[int]
    imports: frozenset[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT")
    parser.add_argument("--draw", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    if arguments.at is None:
        found = packages(CHECKOUT / "src")
        documents.put("architecture.md", "house", table(found))
        (FOLDER / "house.svg").write_text(drawing(found, "now").svg(), encoding="utf-8")
        return
    with TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "archive", arguments.at, "src"], cwd=CHECKOUT)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        found = packages(Path(folder) / "src")
    print(total(found))
    if arguments.draw is not None:
        arguments.draw.write_text(drawing(found, arguments.at).svg(), encoding="utf-8")


def packages(src: Path) -> dict[str, Package]:
    """Return the packages of an engine below ``src``, the uppermost first."""
    files: dict[str, list[Path]] = {}
    for path in sorted((src / "lightswitch").rglob("*.py")):
        first = path.relative_to(src / "lightswitch").parts[0].removesuffix(".py")
        files.setdefault(first, []).append(path)
    imports = {name: _imports(paths, files.keys()) - {name} for name, paths in files.items()}
    order = [name for name in _from_above(imports) if name != "__init__"]
    return {name: Package(name, [lines(path) for path in files[name]], frozenset(imports[name])) for name in order}


def lines(path: Path) -> int:
    """Return a file's lines of code: none that is blank, a comment or a docstring."""
    text = path.read_text()
    told: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            told.update(range(token.start[0], token.end[0] + 1 if token.string else token.start[0]))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                told.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(told)


def total(found: Mapping[str, Package]) -> str:
    """Return the sizes of an engine in a line."""
    of_files = [count for package in found.values() for count in package.lines if count]
    core = sum(sum(package.lines) for name, package in found.items() if name not in TOOLS)
    return (
        f"{sum(of_files):,} lines of code in {len(of_files)} files, the median of {statistics.median(of_files):.0f}; "
        f"without the tools {core:,}"
    )


def table(found: Mapping[str, Package]) -> list[str]:
    """Return the page's table, and the line below it."""
    rows = [
        [package.name, str(len(package.lines)), f"{sum(package.lines):,}", "tool" if name in TOOLS else ""]
        for name, package in found.items()
    ]
    return [*documents.markdown(["package", "files", "lines of code", ""], rows), "", f"{total(found)}."]


def drawing(found: Mapping[str, Package], when: str) -> Drawing:
    """Draw which package imports which: a row imports the columns that are filled; left of the diagonal, upwards."""
    names = list(found)
    up = [
        (name, other)
        for row, name in enumerate(names)
        for other in found[name].imports
        if other in names and names.index(other) < row
    ]
    told = Drawing(
        f"Imports between packages, {when}",
        "Each row is a package, each column too, in one order from the top down; a filled cell is an import. "
        f"{len(up)} of the imports point up.",
    )
    told.text(f"Imports between packages ({when})", "ink strong")
    for row, name in enumerate(names):
        y = _TOP + row * _CELL
        told.text(name, "ink small", MARGIN, y + 10)
        for column, other in enumerate(names):
            kind = "muted" if row == column else "c0" if other in found[name].imports else "empty"
            kind = "c1" if (name, other) in up else kind
            told.box(kind, _LEFT + column * _cell(names), y, _cell(names) - 1.5, _CELL - 1.5)
    told.y = _TOP + len(names) * _CELL
    return told


def _cell(names: list[str]) -> float:
    return min(_CELL, (WIDTH - MARGIN - _LEFT) / len(names))


def _imports(paths: Iterable[Path], known: Iterable[str]) -> set[str]:
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    engines = {name.split(".")[1] for name in found if name.startswith("lightswitch.")}
    return engines & set(known)


def _from_above(imports: Mapping[str, set[str]]) -> list[str]:
    """Return names in an order in which each imports those after it, as far as there is one: PACKAGES' own first."""
    left, order = dict(imports), []
    rank = {name: number for number, name in enumerate(PACKAGES)}
    while left:
        imported = set().union(*(others for name, others in left.items()))
        free = [name for name in left if name not in imported] or list(left)  # in a circle, any
        first = min(free, key=lambda name: (rank.get(name, len(rank)), name))
        order.append(first)
        del left[first]
    return order


if __name__ == "__main__":
    main()
