"""The packages of the engine with their lines, for docs/architecture.md: read from the sources.

python -m tests.engine.tables.house             # fills its table
"""

from __future__ import annotations

import ast
import statistics

from tests.engine.conftest import CHECKOUT
from tests.engine.tables.documents import markdown
from tests.engine.test_layout import BUDGETS, ENGINE, TOOLS, budget_of, code_lines

PAGE = CHECKOUT / "docs" / "architecture.md"
BEGIN, END = "<!-- house -->\n", "<!-- end of house -->\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", *table(), "", f"{END}{rest.partition(END)[2]}"]))


def table() -> list[str]:
    """Return a row for each package, the uppermost first, and the line below the table."""
    lines = {module: code_lines(path) for module, path in ENGINE.items()}
    rows = []
    for name, budget in BUDGETS.items():
        docstring = ast.get_docstring(ast.parse(ENGINE[f"lightswitch.{name}"].read_text())) or ""
        of_package = sum(count for module, count in lines.items() if budget_of(module) == name)
        what = docstring.splitlines()[0].rstrip(".:") + (" (a tool)" if name in TOOLS else "")
        rows.append([f"`{name}`", what, f"{of_package:,}", f"{budget:,}"])
    counts = [count for count in lines.values() if count]
    total = f"{sum(counts):,} lines of code in {len(counts)} files, with a median of {statistics.median(counts):.0f}."
    return [*markdown(["package", "what it is", "lines", "at most"], rows), "", total]


if __name__ == "__main__":
    main()
