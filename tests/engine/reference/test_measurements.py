"""The page of measurements has every number of a benchmark or a document, and each has what made it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT
from tests.engine.tables.claims import HELD, MEASURED, Claim
from tests.engine.tables.measurements import RESULTS

DOCS = CHECKOUT / "docs"
PAGE = (DOCS / "reference" / "measurements.md").read_text()
MAKEFILE = (CHECKOUT / "Makefile").read_text()
BENCHMARKS = [name for name in re.findall(r"-m benchmarks\.(\w+)", MAKEFILE) if name != "missed"]
TIME_OR_SPEED = re.compile(r"\d[\d.,]* (?:µs|ms|MB)\b|\w+ of (?:a second of )?CPU\b|\w+ times faster")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_row_of_a_benchmark_is_on_the_page(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    told = [line for line in PAGE.splitlines() if f"`python -m benchmarks.{name}`" in line]
    for row in rows:
        assert any(f"| {row['name']} |" in line and f"| {row['ratio']:.3f} |" in line for line in told), row


def test_there_is_no_result_without_a_benchmark() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == {*BENCHMARKS}


def test_the_test_that_holds_a_number_is_there() -> None:
    for claim in HELD:
        assert "def test_" in (CHECKOUT / claim.shown_by).read_text(), claim
        assert not claim.date, claim


@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: claim.quote)
def test_what_measured_a_number_can_be_typed(claim: Claim) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", claim.day)
    match shlex.split(claim.shown_by):
        case ["make", target]:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
        case ["torchrun", *_, "-m", module] | ["python", "-m", module, *_]:
            path = Path("src" if module.startswith("lightswitch") else "", *module.split("."))
            assert (CHECKOUT / path).is_dir() or (CHECKOUT / path).with_suffix(".py").is_file()
        case ["python", script, *_]:
            assert script in ("train.py", "-c")
        case kept:
            assert kept == []


def test_no_document_tells_a_time_or_a_speed_that_is_not_on_the_page() -> None:
    for path in {*DOCS.glob("*.md"), CHECKOUT / "README.md"}:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        prose = " ".join(re.sub(r"^    .*$|^ *\|.*$", "", prose, flags=re.MULTILINE).split())
        told = " ".join(claim.words for claim in (*HELD, *MEASURED) if CHECKOUT / claim.document == path)
        assert [found for found in TIME_OR_SPEED.findall(prose) if found not in told] == [], path
