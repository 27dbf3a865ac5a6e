"""The tests that need a GPU, a file a cell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from tests.engine.conftest import CHECKOUT
from tests.engine.gpu.cells import Cell, Piece, Result, Scale

TINY = ("tests/engine/strategies/test_single.py",)
NOTHING_TO_RUN = 5  # pytest's exit code where all tests of a file are deselected


def piece(scale: Scale) -> Piece:
    """Return a cell for each file that has tests for GPUs."""
    found = sorted(path for path in (CHECKOUT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    files = [str(path.relative_to(CHECKOUT)) for path in found]
    chosen = [file for file in files if not scale.is_tiny or file in TINY]
    return Piece("tests", [Cell(file, partial(_tested, file), limit_seconds=480) for file in chosen], at_once=2)


def _tested(file: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    run = subprocess.run([*command, file], cwd=CHECKOUT, capture_output=True, text=True, timeout=seconds)
    if not report.exists():
        return Result({}, f"pytest ended with {run.returncode}: {(run.stderr or run.stdout)[-500:]}")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [
        str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    found = {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": bad}
    return Result(found, f"failed: {', '.join(bad)}" if bad else "")
