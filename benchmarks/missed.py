"""List the targets that the last results do not reach; the exit code is 1 if there are any.

python -m benchmarks.missed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.results import FOLDER


def main(folder: Path = FOLDER) -> int:
    lines = missed(folder)
    print("\n".join(lines) or "no target is missed")
    return 1 if lines else 0


def missed(folder: Path) -> list[str]:
    """Return a line for each ratio, in the JSON files of a folder, that does not reach its target."""
    return [
        f"missed: {path.stem}: {row['name']} against {row['against']}: {row['ratio']:.3f}, to reach {row['target']}"
        for path in sorted(folder.glob("*.json"))
        for row in json.loads(path.read_text())["rows"]
        if row["reached"] is False
    ]


if __name__ == "__main__":
    sys.exit(main())
