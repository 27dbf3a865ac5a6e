"""Try what the suite catches of the faults that were fixed once.

    python -m tests.mutants                      each mutant by the whole suite, the nearest tests first
    python -m tests.mutants batches runs/a_name  those of a package, and one
    python -m tests.mutants --baseline           each by the tests that came with its mend, alone

What is tried already is not tried again, unless it is named; results.json beside this file keeps it, and table.md shows
it. A catch counts if the test that fails passes without the mutant.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.mutants import table
from tests.mutants.copy_of import Copy, Outcome
from tests.mutants.mutants import HERE, listed
from tests.mutants.nearness import by_nearness

RESULTS = HERE / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant or a package of them; all by default")
    parser.add_argument("--baseline", action="store_true", help="run the tests alone that came with the mends")
    parser.add_argument("--limit-seconds", type=float, help="of tests, for a mutant")
    parser.add_argument("--options", default="", help="of pytest, as \"-n 2 -m 'not slow'\"")
    given = parser.parse_args()
    kind = "baseline" if given.baseline else "suite"
    known = _results().get(kind, {})
    mutants = [it for it in listed(*given.names) if it.name in given.names or it.name not in known]
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Copy(Path(folder, "copy"))
        for mutant in mutants:
            with copy.mutated(mutant) as path:
                tests = mutant.caught_by if given.baseline else by_nearness(copy.folder, path)
                outcome = copy.run(*tests, options=f"-x {given.options}", limit_seconds=given.limit_seconds)
            result = _judged(copy, outcome)
            print(table.line(mutant.name, result), flush=True)
            results = _results()  # another process may have written some meanwhile
            results.setdefault(kind, {})[mutant.name] = result
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            table.write(results, listed())


def _results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _judged(copy: Copy, outcome: Outcome) -> dict[str, Any]:
    """Return who has caught a mutant, if that passes without it; else what is wrong."""
    result: dict[str, Any] = {"seconds": round(outcome.seconds, 1), "caught_by": None}
    if not outcome.failed:
        return result | {"why": "survived" if outcome.is_whole else "survived until the limit"}
    if copy.run(outcome.failed[0]).failed:
        return result | {"why": f"{outcome.failed[0]} fails without the mutant, too"}
    return result | {"caught_by": outcome.failed[0]}


if __name__ == "__main__":
    main()
