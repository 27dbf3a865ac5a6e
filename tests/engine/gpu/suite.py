"""The tests that need a GPU, a file a cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from tests.engine.conftest import CHECKOUT
from tests.engine.gpu.cells import Cell, Piece, Result, Scale
from tests.engine.gpu.command import run

TINY = ("tests/engine/strategies/test_single.py",)
MOST_WORKERS = 6


def piece(scale: Scale) -> Piece:
    """Return a cell for each file that has tests for GPUs."""
    found = sorted(path for path in (CHECKOUT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    files = [str(path.relative_to(CHECKOUT)) for path in found]
    chosen = [file for file in files if not scale.is_tiny or file in TINY]
    return Piece("tests", [Cell(file, partial(tested, file), limit_seconds=480) for file in chosen], at_once=2)


def tested(file: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    """Run the tests of a file that are marked gpu; return how many passed, and what those that failed say."""
    report = folder / "report.xml"
    without = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the second warns of other processes: an error here
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *without, f"--junitxml={report}"]
    workers = f"--numprocesses={min(MOST_WORKERS, (os.cpu_count() or 1) // 2)}"  # runs of some seconds share the card
    finished = run([*command, workers, file], folder, seconds, cwd=CHECKOUT)
    if not report.exists():
        return Result({}, f"pytest ended with {finished.returncode}: {(finished.stderr or finished.stdout)[-500:]}")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = {str(case.get("name")): told for case in cases if (told := _failure(case)) is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    found = {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": [*bad]}
    return Result(found, "; ".join(f"{name} failed: {told}" for name, told in bad.items()))


def _failure(case: ElementTree.Element) -> str | None:
    """Return the first lines of what pytest says of a test that failed; None where it did not."""
    kinds = (case.find(kind) for kind in ("failure", "error"))
    told = next((one for one in kinds if one is not None), None)
    return None if told is None else " ".join(str(told.get("message")).split())[:1000]
