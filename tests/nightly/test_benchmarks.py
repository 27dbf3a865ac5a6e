"""That each benchmark runs and writes its results; how fast anything is, a test can't tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import missed
from benchmarks.results import Row, interleaved, row
from tests.engine.conftest import CHECKOUT

ROWS = {
    "startup": [
        *("strategy=fdsp", "train.py to its first step", "a plain Trainer to its first step"),
        "train.py to its first step, all extras installed",
    ],
    "step": ["MLP", "MLP", "the peer's way", "GPT", "GPT", "GPT, compiled as a whole"],
    "ddp": ["MLP, two processes", "replicas compared, two processes", "weights looked at, two processes, fsdp"],
    "plan": ["two layers on one device"],
    "save": ["a save", "a save"],
    "shards": ["training, 64 × 64", "loading alone, 64 × 1024"],
    "data": ["images, 128 of 28 × 28", "tokens, 64 × 256"],
    "streams": ["stream", "stream, 1 of 4 devices", "stream, 2 workers"],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_prints_a_table_and_writes_the_same_as_json(name: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [
        sys.executable if name == "startup" else "python",
        "-m",
        f"benchmarks.{name}",
        "--quick",
        "--out",
        str(out),
    ]
    finished = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)

    assert finished.returncode == 0, finished.stderr
    written = json.loads(out.read_text())
    assert set(written) - {"memory"} == {"date", "quick", "machine", "per", "rows"}
    assert written["quick"] is True
    assert [measured["name"] for measured in written["rows"]] == ROWS[name]
    for measured in written["rows"]:
        assert set(measured) == {*Row.__dataclass_fields__, "reached"}
        assert measured["milliseconds"] > 0
        assert measured["ratio"] > 0
        assert f"{measured['ratio']:.3f}" in finished.stdout


def test_what_is_missed_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "against": "b", "ratio": 1.9, "target": "≤ 1.8", "reached": False}]
    rows.append({**rows[0], "name": "c", "ratio": 1.7, "reached": True})
    (tmp_path / "step.json").write_text(json.dumps({"rows": rows}))
    assert missed.main(tmp_path) == 1
    assert capsys.readouterr().out == "missed: step: a against b: 1.900, to reach ≤ 1.8\n"
    (tmp_path / "step.json").unlink()
    assert missed.main(tmp_path) == 0


def test_a_ratio_is_the_median_of_those_of_each_round() -> None:
    seconds = {"mine": [1.0, 6.0, 2.0], "other": [2.0, 4.0, 2.0]}

    slower = row("mine", "other", seconds, "≤ 0.9")
    speed_up = row("other", "mine", seconds)

    assert slower == Row("mine", "other", 2000.0, 2000.0, 1.0, "≤ 0.9")
    assert slower.reached is False
    assert speed_up.reached is None


def test_rounds_alternate_in_their_order() -> None:
    order: list[str] = []
    contenders = {name: lambda name=name: order.append(name) or 1.0 for name in ("a", "b")}

    assert interleaved(contenders, 3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert order == ["a", "b", "b", "a", "a", "b"]
