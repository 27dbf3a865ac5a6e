"""The documentation site is built with nothing dead in it, and each benchmark runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import missed
from benchmarks.results import Row, interleaved, row
from tests.engine.conftest import CHECKOUT
from tests.engine.tables.reference import pages

# The documentation site: built with nothing dead in it


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(CHECKOUT / "docs", tmp_path / "docs")
    for file in ("mkdocs.yml", "README.md"):
        shutil.copy(CHECKOUT / file, tmp_path)
    for name, text in pages().items():
        (tmp_path / "docs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "docs" / name).write_text(text)
    return tmp_path


def _built_in(folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": "https://example.org/us/lightswitch"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder / "site")]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_it_is_built_strictly_and_links_to_the_repository(copy: Path) -> None:
    built = _built_in(copy)
    assert built.returncode == 0, built.stderr
    home = (copy / "site" / "index.html").read_text()
    assert 'href="https://example.org/us/lightswitch/blob/main/CONTRIBUTING.md"' in home
    assert 'href="scale-out.html"' in home
    assert "fonts.googleapis" not in home
    assert '<html lang="zh-Hans"' in (copy / "site" / "zh-Hans" / "start.html").read_text()
    assert "does not divide over" in (copy / "site" / "search" / "search_index.json").read_text()


def test_a_dead_link_or_anchor_and_a_page_that_is_not_in_the_navigation_fail(copy: Path) -> None:
    (copy / "docs" / "lost.md").write_text("# Lost\n\n[more](gone.md), [more](scale-out.md#nowhere)\n")
    built = _built_in(copy)
    assert built.returncode != 0
    assert [name for name in ("lost.md", "gone.md", "nowhere") if name not in built.stderr] == []


# Each benchmark runs and writes its results; how fast anything is, a test can't tell


@pytest.mark.parametrize("name", ["startup", "step", "ddp", "plan", "save", "shards", "data", "streams"])
def test_a_benchmark_prints_a_table_and_writes_the_same_as_json(name: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    python = sys.executable if name == "startup" else "python"
    command = [python, "-m", f"benchmarks.{name}", "--quick", "--out", str(out)]
    finished = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    written = json.loads(out.read_text())
    assert set(written) - {"memory"} == {"date", "quick", "machine", "per", "rows"}
    assert written["rows"]
    for measured in written["rows"]:
        assert set(measured) == {*Row.__dataclass_fields__, "reached"}
        assert measured["milliseconds"] > 0
        assert f"{measured['ratio']:.3f}" in finished.stdout


def test_the_table_of_growth_has_a_slope_for_each_cost() -> None:
    command = ["python", "-m", "benchmarks.growth", "--quick"]
    head, *rows = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert head.split() == ["what", "of", "at", "costs", "at", "costs", "slope", "asked"]
    assert len(rows) == 8


def test_what_is_missed_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "against": "b", "ratio": 1.9, "target": "≤ 1.8", "reached": False}]
    rows.append({**rows[0], "name": "c", "ratio": 1.7, "reached": True})
    (tmp_path / "step.json").write_text(json.dumps({"rows": rows}))
    assert missed.main(tmp_path) == 1
    assert capsys.readouterr().out == "missed: step: a against b: 1.900, to reach ≤ 1.8\n"


def test_a_ratio_is_the_median_of_those_of_each_round_and_rounds_alternate_in_their_order() -> None:
    seconds = {"mine": [1.0, 6.0, 2.0], "other": [2.0, 4.0, 2.0]}
    slower = row("mine", "other", seconds, "≤ 0.9")
    assert slower == Row("mine", "other", 2000.0, 2000.0, 1.0, "≤ 0.9")
    assert slower.reached is False
    order: list[str] = []
    interleaved({name: lambda name=name: order.append(name) or 1.0 for name in ("a", "b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_make_says_what_it_does_not_run(tmp_path: Path) -> None:
    """With any Python that is given, and nothing of the packages in a place of their own."""
    command = ["make", "gpu", f"PYTHON={sys.executable}", "PIECE=matrix largest", f"OUT={tmp_path}/gpu.json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    finished = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1].startswith("no GPU here; not run: matrix, largest.")
