"""Run directories of strangers: compared in a table that harms nobody, or refused in a line, and never waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightswitch.compare import page
from lightswitch.errors import Refused
from tests.engine.test_regular_files import BOMB

CONFIG = "name: x\nobjective: val/loss\ntrainer: {devices: 1, num_nodes: 1}\nmodel: {width: 1}\n"
METRICS = "step,train/loss\n0,1.0\n1,0.5\n"
TIMES = {"startup_seconds": 1.0, "world_size": 1, "on_cuda": False, "peak_bytes": 1, "trained_steps": 1}
TIMES |= {"saving_seconds": 0.0, "measured_steps": 1, "seconds": {"data": 1.0}, "overlapped_seconds": {}}
JOB = {"number": 0, "overrides": ["a=1"], "directory": "x", "state": "failed", "error": "no"}
ESCAPE, SCRIPT = "\x1b[31m", "<script>alert(1)</script>"


def _runs(folder: Path) -> list[Path]:
    for name in ("odd", "good"):
        (folder / name / ".hydra").mkdir(parents=True)
        (folder / name / "config.yaml").write_text(CONFIG)
        (folder / name / "metrics.csv").write_text(METRICS)
    return [folder / "odd", folder / "good"]


def _json(name: str, *contents: object) -> dict[str, Callable[[Path], object]]:
    def written(content: object) -> Callable[[Path], object]:
        return lambda run: (run / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return {f"{name} {number}": written(content) for number, content in enumerate(contents)}


HARMLESS: dict[str, Callable[[Path], object]] = {
    **_json("config.yaml", BOMB, "a: " + "[" * 500 + "]" * 500, "[]", "trainer: 5", f"{CONFIG}\nm: {'9' * 400}"),
    **_json(".hydra/config.yaml", BOMB, "5"),
    **_json("plan.json", "[" * 100_000, [], {"strategies": [{"words": 5}]}, {"strategies": {"a": "9" * 5000}}),
    **_json("plan.json more", "{}"),
    **_json("job.json", [], {**JOB, "overrides": 5}, {**JOB, "overrides": [{}]}, {**JOB, "error": {}}, "[" * 100_000),
    **_json("job.json odd", {**JOB, "state": []}),
    **_json(
        "step_times.json", {**TIMES, "seconds": 5}, {**TIMES, "peak_bytes": "x"}, {**TIMES, "seconds": {"data": []}}
    ),
    **_json("step_times.json large", {**TIMES, "seconds": {"data": 1e308}}, {**TIMES, "peak_bytes": int("9" * 400)}),
    **_json("metrics.csv", f"{METRICS}2,1e308\n3,-1e308\n", f"{METRICS}{'9' * 5000},1\n", "step,$x$\n0,1\n1,2\n", ""),
    **_json(
        "metrics.csv odd",
        f"{METRICS}2,1,2,3\n",
        f"{METRICS}²,1\n",
        "step\n0\n",
        "step,throughput/samples_per_second\n0,0\n",
    ),
    "trainer 1e308": lambda run: (run / "config.yaml").write_text(
        CONFIG.replace("devices: 1", f"devices: {'9' * 400}")
    ),
}


@pytest.mark.parametrize("odd", HARMLESS)
def test_what_is_odd_in_a_run_is_left_out(odd: str, tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    HARMLESS[odd](runs[0])
    assert list(page.write(runs, tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


@pytest.mark.parametrize("content", [f"step,train/loss\n0,{'9' * 200_000}\n", None])
def test_metrics_that_are_no_table_are_refused(content: str | None, tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    (runs[0] / "metrics.csv").unlink()
    if content is None:
        os.mkfifo(runs[0] / "metrics.csv")
    else:
        (runs[0] / "metrics.csv").write_text(content)
    with pytest.raises(Refused, match=r"^\S*odd/metrics\.csv can't be read as the metrics of a run: [^\n]*$"):
        list(page.write(runs, tmp_path / "page.html"))


def test_no_text_of_a_run_acts_on_a_terminal_or_a_browser(tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    hostile = f"{ESCAPE}{SCRIPT}|\n![x](http://elsewhere/x.png)"
    (runs[0] / "config.yaml").write_text(CONFIG + f"text: {json.dumps(hostile)}\n")
    (runs[0] / "job.json").write_text(json.dumps({**JOB, "overrides": [hostile], "error": hostile}))
    for run in runs:
        (run / "metrics.csv").write_text(f"step,{ESCAPE}{SCRIPT}\n0,1\n")
    told = "\n".join(page.write(runs, tmp_path / "page.html"))
    assert "alert(1)" in told
    assert "\x1b" not in told
    for name in ("page.html", "page.md"):
        text = (tmp_path / name).read_text()
        assert "alert(1)" in text
        assert "<script" not in text
    assert "](http" not in (tmp_path / "page.md").read_text()


def test_nor_does_a_refusal(tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    (runs[0] / "config.yaml").write_text(f'name: "{ESCAPE[1:]}\\e[31m"\n')
    command = [sys.executable, "-m", "lightswitch.compare", *map(str, runs), "-o", str(tmp_path / "page.html")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "found runs with different names: " in refused.stderr
    assert "\x1b" not in refused.stderr


def test_a_link_in_the_place_of_the_page_leads_nowhere(tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    (tmp_path / "others").write_text("of somebody else")
    for name in ("page.html", "page.md"):
        (tmp_path / name).symlink_to("others")
    list(page.write(runs, tmp_path / "page.html"))
    assert (tmp_path / "others").read_text() == "of somebody else"
