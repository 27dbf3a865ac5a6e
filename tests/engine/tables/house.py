"""The packages of the engine, their lines and their imports, for docs/architecture.md: read from the sources.

python -m tests.engine.tables.house             # fills its table
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from tests.engine.tables import documents
from tests.engine.test_layout import ENGINE, PACKAGES, TOOLS, code_lines, engine_imports, package_of


@dataclass(frozen=True)
class Package:
    """A package of the engine, or a file beside the packages.

    Attributes:
        lines: of code, of each file: none that is blank, a comment or a docstring.
        imports: names of other packages, wherever in a file they are imported.
    """

    lines: list[int]
    imports: frozenset[str]


def main() -> None:
    found = packages()
    documents.put("architecture.md", "house", table(found))


def packages() -> dict[str, Package]:
    """Return the packages of the engine, the uppermost first."""
    files = {name: [module for module in ENGINE if package_of(module) == name] for name in PACKAGES}
    imports = {
        name: {package_of(other) for module in modules for other in engine_imports(module)} - {name, ""}
        for name, modules in files.items()
    }
    lines = {name: [code_lines(ENGINE[module]) for module in modules] for name, modules in files.items()}
    return {name: Package(lines[name], frozenset(imports[name])) for name in PACKAGES}


def table(found: Mapping[str, Package]) -> list[str]:
    """Return the page's table, and the line below it."""
    rows = [
        [name, str(len(package.lines)), f"{sum(package.lines):,}", "tool" if name in TOOLS else ""]
        for name, package in found.items()
    ]
    of_files = [count for package in found.values() for count in package.lines if count]
    core = sum(sum(package.lines) for name, package in found.items() if name not in TOOLS)
    total = (
        f"{sum(of_files):,} lines of code in {len(of_files)} files, the median of {statistics.median(of_files):.0f}; "
        f"without the tools {core:,}."
    )
    return [*documents.markdown(["package", "files", "lines of code", ""], rows), "", total]


if __name__ == "__main__":
    main()
