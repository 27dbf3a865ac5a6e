"""Try whether tests catch the faults that were fixed once.

    python -m tests.mutants                      each mutant by the tests that came with its mend
    python -m tests.mutants batches runs/a_name  those of a package, and one
    python -m tests.mutants --suite runs/a_name  by all that `make test` runs, up to the first failure

A catch counts if the test passes without the mutant. Exits with 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.mutants.mutants import Copy, listed

SUITE = ("tests/engine", "tests/project")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant or a package of them; all by default")
    parser.add_argument("--suite", action="store_true", help="try all tests of the day, up to the first failure")
    parser.add_argument("--limit-seconds", type=float, help="of tests, for a mutant")
    parser.add_argument("--options", default="", help="of pytest, as '-n 2'")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # nothing of it is left behind
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Copy(Path(folder, "copy"))
        for mutant in listed(*given.names):
            tests = SUITE if given.suite else mutant.caught_by
            with copy.mutated(mutant):
                tried = copy.run(*tests, options=f"-x {given.options}", limit_seconds=given.limit_seconds)
            caught_by = next(iter(tried.failed), None)
            if caught_by is None:
                found = "survived" if tried.is_whole else "survived until the limit"
            else:
                fails_anyway = caught_by in copy.run(caught_by).failed
                found = f"caught by {caught_by}" + (", which fails without the mutant, too" if fails_anyway else "")
            survived += caught_by is None or fails_anyway
            print(f"{mutant.name}: {found}, {tried.seconds:.0f} s", flush=True)
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
