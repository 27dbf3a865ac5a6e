"""Try what the suite catches of the faults that were fixed once.

    python -m tests.mutants                      each mutant by the daily suite, the nearest tests first
    python -m tests.mutants batches runs/a_name  those of a package, and one
    python -m tests.mutants --baseline           each by the tests that came with its mend, alone

What is tried already is not tried again, unless it is named; results.json beside this file keeps it, and table.md shows
it. At the end, the tests that have caught a mutant are run without any: a catch counts if they pass then.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mutants import table
from tests.mutants.copy_of import Copy
from tests.mutants.mutants import HERE, Mutant, listed
from tests.mutants.nearness import by_nearness

RESULTS = HERE / "results.json"
DAILY, NIGHTLY = ("tests/engine", "tests/project"), "tests/nightly"
_CHECKED_AT_ONCE = 10
Result = dict[str, Any]  # seconds; caught_by, a test or None; why, where there is none; passes: without the mutant, too


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant or a package of them; all by default")
    parser.add_argument("--baseline", action="store_true", help="run the tests alone that came with the mends")
    parser.add_argument("--nightly", action="store_true", help="try also the tests that run at night")
    parser.add_argument("--limit-seconds", type=float, help="of tests, for a mutant")
    parser.add_argument("--options", default="", help="of pytest, as '-n 2'")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # nothing of it is left behind
    kind = "baseline" if given.baseline else "suite"
    chosen = listed(*given.names)
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy, known = Copy(Path(folder, "copy")), _results(kind)
        for mutant in chosen:
            if mutant.name not in known or mutant.name in given.names:
                found = _tried(copy, mutant, given)
                _keep(kind, {mutant.name: found})
                print(table.line(mutant.name, found), flush=True)
        _check(copy, kind, chosen)


def _tried(copy: Copy, mutant: Mutant, given: argparse.Namespace) -> Result:
    """Run tests up to the first that fails with a mutant; those that are near without collecting the others."""
    seconds, left = 0.0, given.limit_seconds or math.inf
    folders = [*DAILY, *([NIGHTLY] if given.nightly else [])]
    with copy.mutated(mutant) as path:
        for tests in (mutant.caught_by,) if given.baseline else by_nearness(copy.folder, path, folders):
            outcome = copy.run(*tests, options=f"-x {given.options}", limit_seconds=left - seconds)
            seconds += outcome.seconds
            if outcome.failed or not outcome.is_whole:
                break
    found: Result = {"seconds": round(seconds, 1), "caught_by": next(iter(outcome.failed), None)}
    if not outcome.failed:
        found["why"] = "survived" if outcome.is_whole else "survived until the limit"
    return found


def _check(copy: Copy, kind: str, chosen: list[Mutant]) -> None:
    """Run the tests that have caught mutants without any, the quick ones first."""
    names = {mutant.name for mutant in chosen}
    unchecked = [(name, found) for name, found in _results(kind).items() if name in names and "passes" not in found]
    unchecked = sorted((one for one in unchecked if one[1]["caught_by"]), key=lambda one: one[1]["seconds"])
    for begin in range(0, len(unchecked), _CHECKED_AT_ONCE):
        some = dict(unchecked[begin : begin + _CHECKED_AT_ONCE])
        failed = copy.run(*sorted({found["caught_by"] for found in some.values()})).failed
        _keep(kind, {name: {**found, "passes": found["caught_by"] not in failed} for name, found in some.items()})
        for name, found in some.items():
            if found["caught_by"] in failed:
                print(f"{name}: {found['caught_by']} fails without the mutant, too", flush=True)


def _results(kind: str) -> dict[str, Result]:
    known: dict[str, Result] = _all_results().get(kind, {})
    return known


def _all_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _keep(kind: str, found: dict[str, Result]) -> None:
    """Write results beside those that are there, and the table; another process may write some, too."""
    results = _all_results()
    results.setdefault(kind, {}).update(found)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    table.write(results, listed())


if __name__ == "__main__":
    main()
