"""Pages of `python -m lightswitch.compare`: of real runs, of what is no run, and of strangers' run directories.

What a stranger has written into a run is left out or refused in a line, acts on nobody, and is never waited for.
"""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightswitch.compare import page
from lightswitch.compare.__main__ import main
from lightswitch.errors import Refused
from tests.engine.compare.test_comparison import run
from tests.engine.conftest import PLAIN, Train
from tests.engine.test_regular_files import BOMB

SHORT = ("trainer.max_steps=8", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1")
SHORT += ("callbacks=[default,step_times]", "callbacks.step_times.skip_steps=2", "global_batch_size=24")


def test_a_switch_that_does_not_change_the_run_shows_equal_curves(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(*PLAIN, *SHORT, "run_id=single", "strategy=single", folder=tmp_path)
    train(*PLAIN, *SHORT, "run_id=ddp", "strategy=ddp", ranks=2, folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    main(["runs/plainmodel/single", "runs/plainmodel/ddp"])
    told = capsys.readouterr().out
    found = {row.split("  ")[0]: row.split()[-2:] for row in told.splitlines()}
    assert found["devices"] == ["1", "2"]
    assert found["trainer.strategy._target_"] == ["Single", "DDP"]
    assert found["communication, ms"][0] == "0" != found["communication, ms"][1]
    assert not found.keys() & {"run_id", "trainer.default_root_dir"}
    apart = re.findall(r"^train/loss (?:differs by (\S+) at most|is the same)", told, re.MULTILINE)
    assert float(apart[0] or 0) <= 1e-5
    assert told.endswith("\n\npage       runs/plainmodel/compare.html\n")
    reader, written = _Reader(), Path("runs/plainmodel/compare.html").read_text()
    reader.feed(written)
    assert (reader.open, reader.others) == ([], [])
    assert {"train/loss", "single", "ddp", "backward, ms"} <= set(reader.texts)
    assert written.count("<svg") >= 2
    titles = ["Values", "Speed and memory", "Time of a step", "Settings that differ"]
    assert re.findall(r"<h2>(.*)</h2>", written) == titles


class _Reader(HTMLParser):
    """Elements that are not closed, and what a browser would load or run."""

    EMPTY = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.others: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [tag] if tag not in self.EMPTY else []
        self.others += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.others += [value or "" for name, value in attrs if name.endswith(("src", "href")) and value[:1] != "#"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("line", "polyline"), "of SVG"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        self.others += re.findall(r"url\((?!#)|@import", data)


def test_a_curve_is_drawn_by_hand_with_a_mark_at_a_change_of_machines() -> None:
    """Steps 0 to 4 lie 106 pixels apart from 48 on; values 1 to 3 from 222 up to 8."""
    changed = run("changed", curves={"x": {0: 1.0, 2: math.nan, 4: 3.0}}, changes=(2,))
    svg = page.curve([changed, run("other", curves={"x": {0: 2.0}})], "x")
    assert re.findall(r'points="(.*?)"', svg) == ["48.0,222.0 472.0,8.0", "48.0,115.0"]
    assert re.findall(r'<line x1="(.*?)" x2="(.*?)" y1.*?style="(.*?)"', svg)[-1:] == [
        ("260.0", "260.0", "stroke: var(--c0); stroke-dasharray: 2")
    ]


# Runs that are none, or not whole

CONFIG = "name: x\nobjective: val/loss\ntrainer: {devices: 1, num_nodes: 1}\nmodel: {width: 1}\n"
METRICS = "step,train/loss\n0,1.0\n1,0.5\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    for name in ("odd", "good"):
        _written(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return [tmp_path / "odd", tmp_path / "good"]


def _written(run: Path) -> Path:
    (run / ".hydra").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "metrics.csv").write_text(METRICS)
    return run


def _refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("missing good", "missing: there is no such directory; give run directories, as runs/NAME/RUN_ID\n"),
        ("empty good", "found one run in empty, good, expected two or more; give run directories, as runs/NAME/RUN_ID"),
        ("good odd/../good", "found one run in good, odd/../good, expected two or more; give run directories"),
        ("good odd -o page.md", "end it with .html"),
        ("good odd -o no/page.html", "there is no folder no"),
        ("good odd --tag=none", "found 0 runs with the tags none, expected two or more; type tags=[none] when you"),
    ],
)
def test_what_can_not_be_compared_is_told_in_a_line(
    words: str, told: str, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert told in _refusal(words, capsys)


def test_a_page_replaces_no_file_but_of_a_comparison_and_names_what_is_no_run(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.html").write_text("# mine\n")
    assert "mine.html exists already, and is of no comparison" in _refusal("odd good -o mine.html", capsys)
    assert (tmp_path / "mine.html").read_text() == "# mine\n"
    (tmp_path / "plan").mkdir()
    for _ in range(2):  # the second finds the page of the first among what a shell's * gives
        main([*map(str, tmp_path.iterdir())])
        assert "left out   plan: it is no run\n" in capsys.readouterr().out
    assert "x: 2 runs compared" in (tmp_path / "compare.html").read_text()
    (tmp_path / "compare.html").unlink()
    (tmp_path / "compare.html").symlink_to("mine.html")
    main(["odd", "good"])
    assert (tmp_path / "mine.html").read_text() == "# mine\n"


TIMED = {"startup_seconds": 1.0, "world_size": 1, "peak_bytes": 1, "trained_steps": 1}
TIMED |= {"saving_seconds": 0.0, "measured_steps": 1, "seconds": {"data": 1.0}, "overlapped_seconds": 0.0}
JOB = {"number": 0, "overrides": ["a=1"], "directory": "x", "state": "failed", "error": "no"}
MANY = "9" * 400
ODD: dict[str, list[object]] = {
    "config.yaml": [
        BOMB,
        "a: " + "[" * 500 + "]" * 500,
        "[]",
        "trainer: 5",
        f"{CONFIG}\nm: {MANY}",
        CONFIG.replace("es: 1", f"es: {MANY}"),
    ],
    ".hydra/config.yaml": [BOMB, "5"],
    "job.json": [[], {**JOB, "overrides": 5}, {**JOB, "overrides": [{}]}, {**JOB, "error": {}}, {**JOB, "state": []}],
    "step_times.json": [
        {**TIMED, "seconds": 5},
        {**TIMED, "peak_bytes": "x"},
        {**TIMED, "seconds": {"data": []}},
        {**TIMED, "seconds": {"data": 1e308}},
        {**TIMED, "peak_bytes": int(MANY)},
    ],
    "metrics.csv": [
        f"{METRICS}2,1e308\n3,-1e308\n",
        f"{METRICS}{'9' * 5000},1\n",
        "step,$x$\n0,1\n1,2\n",
        "",
        f"{METRICS}2,1,2,3\n",
        f"{METRICS}²,1\n",
        "step\n0\n",
        "step,throughput/samples_per_second\n0,0\n",
    ],
}


def test_what_is_odd_in_a_run_is_left_out(runs: list[Path], tmp_path: Path) -> None:
    for number, (file, content) in enumerate((file, content) for file, contents in ODD.items() for content in contents):
        odd = _written(tmp_path / f"odd_{number}")
        (odd / file).write_text(content if isinstance(content, str) else json.dumps(content))
        runs.append(odd)
    assert list(page.write(runs, tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


@pytest.mark.parametrize("content", [f"step,train/loss\n0,{'9' * 200_000}\n", None])
def test_metrics_that_are_no_table_are_refused(content: str | None, runs: list[Path], tmp_path: Path) -> None:
    (runs[0] / "metrics.csv").unlink()
    if content is None:
        os.mkfifo(runs[0] / "metrics.csv")
    else:
        (runs[0] / "metrics.csv").write_text(content)
    with pytest.raises(Refused, match=r"^\S*odd/metrics\.csv can't be read as the metrics of a run: [^\n]*$"):
        list(page.write(runs, tmp_path / "page.html"))


def test_no_text_of_a_run_acts_on_a_terminal_or_a_browser(runs: list[Path], tmp_path: Path) -> None:
    script = "\x1b[31m<script>alert(1)</script>"
    hostile = f"{script}|\n![x](http://elsewhere/x.png)"
    (runs[0] / "config.yaml").write_text(CONFIG + f"text: {json.dumps(hostile)}\n")
    (runs[0] / "job.json").write_text(json.dumps({**JOB, "overrides": [hostile], "error": hostile}))
    for one in runs:
        (one / "metrics.csv").write_text(f"step,{script}\n0,1\n")
    told = "\n".join(page.write(runs, tmp_path / "page.html"))
    assert "alert(1)" in told
    assert "\x1b" not in told
    text = (tmp_path / "page.html").read_text()
    assert "alert(1)" in text
    assert "<script" not in text
