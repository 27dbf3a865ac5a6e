"""What `python -m lightswitch.compare` says: arithmetic by hand, pages of real runs, and of strangers' run directories.

What a stranger has written into a run is left out or refused in a line, acts on nobody, and is never waited for.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightswitch.compare import page
from lightswitch.compare.__main__ import main
from lightswitch.compare.quantities import apart, metrics, sections
from lightswitch.compare.run import Curve, Run, read
from lightswitch.errors import Refused
from lightswitch.runs.resume import Start
from tests.engine.conftest import PLAIN, Train


def run(label: str, devices: int = 1, **fields: Any) -> Run:
    found = {"state": "finished", "name": "gpt", "objective": "val/loss", **fields}
    return Run(Path("runs/gpt") / label, label, devices=devices, **found)


def losses(**curves: Curve) -> list[Run]:
    return [run(label, curves={"train/loss": curve}) for label, curve in curves.items()]


def rows(runs: list[Run], section: str) -> dict[str, list[str]]:
    (found,) = (one.rows for one in sections(runs) if one.title == section)
    return found


def test_the_largest_difference_is_between_the_extremes_of_a_step_that_all_have() -> None:
    """At 9 the three are 0.25 apart, at 19 3.0, 3.25 and 2.5, which is 0.75; at 29, one has no value."""
    runs = losses(a={9: 4.0, 19: 3.0, 29: 1.0}, b={9: 4.25, 19: 3.25}, c={9: 4.0, 19: 2.5, 29: 9.0})
    assert apart(runs) == "train/loss differs by 0.75 at most, at step 19."
    assert apart(losses(a={0: 4.0, 1: 3.0}, b={0: 4.0})) == "train/loss differs by 0 at most, at step 0."
    assert apart(losses(a={0: 1.0}, b={1: 1.0})) is None
    assert apart([runs[0], run("vit", name="vit", curves=runs[1].curves)]) is None


def test_a_loss_that_is_no_number_is_the_largest_difference() -> None:
    for lost in (math.nan, math.inf):
        runs = losses(sound={0: 1.0, 1: 1.0, 2: 1.0}, broken={0: 5.0, 1: lost, 2: lost})
        assert apart(runs) == "train/loss differs by inf at most, at step 1."


def test_values_of_any_metrics_stand_beside_one_another_the_best_by_the_direction_of_the_name() -> None:
    """Accuracy is best at its highest, a loss at its lowest; a run of another model lacks what it does not log."""
    first = run("a", curves={"train/loss": {0: 1.0, 9: 0.5}, "val/acc": {4: 0.975, 9: 0.95}, "test/acc": {9: 0.9}})
    other = run("b", name="vit", curves={"val/acc": {4: 0.5, 9: math.nan}, "val/loss": {4: 0.25, 9: 0.5}})
    assert rows([first, other], "Values") == {
        "val/loss, best": ["–", "0.25"],
        "val/loss": ["–", "0.5"],
        "val/acc, best": ["0.975", "0.5"],
        "val/acc": ["0.95", "not finite"],
        "test/acc": ["0.9", "–"],
        "train/loss, first": ["1", "–"],
        "train/loss": ["0.5", "–"],
    }


def test_of_many_runs_each_has_a_row_of_the_table() -> None:
    for count in (2, 7):
        runs = [run(f"run{number}", curves={"test/acc": {0: number / 4}}) for number in range(count)]
        lines = page.terminal(runs, sections(runs))
        assert lines[0].split() == (["run0", "run1"] if count == 2 else ["run", "test/acc", "devices", "state"])
    assert lines[-1].split() == ["run6", "1.5", "1", "finished"]


def test_a_run_that_goes_on_after_a_failure_has_not_failed(tmp_path: Path) -> None:
    """Its last start, which also tells the number of devices behind `devices=auto`, is later than the failure."""
    report, record = tmp_path / "crash" / "first" / "failure.txt", tmp_path / "run.json"
    report.parent.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("name: gpt\ntrainer: {devices: auto, num_nodes: 2}\n")
    report.write_text("RuntimeError: lost\nmore\n")
    record.write_text(json.dumps({"starts": [asdict(Start(0, ["a", "b"], 4))]}))
    found = []
    for seconds in (60, -60):
        os.utime(report, (record.stat().st_mtime + seconds,) * 2)
        found.append([(run.state, run.failure, run.devices) for run in read([tmp_path])])
    assert found == [[("failed", "RuntimeError: lost", 8)], [("not finished", None, 8)]]


def test_speed_is_the_median_of_what_was_logged() -> None:
    """Of 90, 100 and 500 samples a second, 100: 6,400 tokens of 64, and 320 ms for 32 samples."""
    logged = {0: 90.0, 1: 100.0, 2: 500.0}
    curves = {
        "throughput/samples_per_second": logged,
        "throughput/tokens_per_second": {step: 64 * speed for step, speed in logged.items()},
        "throughput/step_seconds": {step: 32 / speed for step, speed in logged.items()},
    }
    slower = {"throughput/samples_per_second": {0: 50.0}}
    speeds = rows([run("slow", curves=slower), run("fast", 4, curves=curves)], "Speed and memory")
    assert speeds == {
        "devices": ["1", "4"],
        "tokens/s": ["–", "6.4k"],
        "ms/step": ["–", "320"],
        "state": ["finished", "finished"],
    }


def test_configs_are_beside_one_another_where_they_differ() -> None:
    first = run("a", config={"optimizer.lr": "0.001", "seed": "1", "run_id": "a"})
    second = run("b", config={"seed": "1", "run_id": "b"})
    failed = Run(Path("runs/gpt/c"), "c", "failed", failure="error: no")
    assert rows([first, second, failed], "Settings that differ") == {"optimizer.lr": ["0.001", "–", "–"]}


def test_the_judged_metric_is_found_by_the_name_that_the_module_logs(tmp_path: Path) -> None:
    for name in ("a/x", "b/x"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("name: resnet\nobjective: val/loss\n")
        (tmp_path / name / "metrics.csv").write_text("step,train/loss,val_loss\n0,2.0,\n9,1.0,0.125\n10,0.")
    runs = read([tmp_path / "a/x", tmp_path / "b/x"])
    assert [one.label for one in runs] == ["a/x", "b/x"]
    assert metrics(runs) == ["val_loss", "train/loss"]
    assert rows(runs, "Values")["val_loss"] == ["0.125", "0.125"]


SHORT = ("trainer.max_steps=8", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1")
SHORT += ("callbacks=[default,step_times]", "global_batch_size=24")


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
    assert not found.keys() & {"run_id", "trainer.default_root_dir"}
    apart = re.findall(r"^train/loss differs by (\S+) at most", told, re.MULTILINE)
    assert float(apart[0]) <= 1e-5
    assert told.endswith("\n\npage       runs/plainmodel/compare.html\n")
    reader, written = _Reader(), Path("runs/plainmodel/compare.html").read_text()
    reader.feed(written)
    assert (reader.open, reader.others) == ([], [])
    assert {"train/loss", "single", "ddp", "forward_backward, ms"} <= set(reader.texts)
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


def test_a_curve_is_drawn_by_hand() -> None:
    """Steps 0 to 4 lie 106 pixels apart from 48 on; values 1 to 3 from 222 up to 8."""
    broken = run("broken", curves={"x": {0: 1.0, 2: math.nan, 4: 3.0}})
    svg = page.curve([broken, run("other", curves={"x": {0: 2.0}})], "x")
    assert re.findall(r'points="(.*?)"', svg) == ["48.0,222.0 472.0,8.0", "48.0,115.0"]


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
        ("good odd -o no/page.html", "No such file or directory"),
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


JOB = {"number": 0, "overrides": ["a=1"], "directory": "x", "state": "failed", "error": "no"}
MANY = "9" * 400
ODD: dict[str, list[object]] = {
    "config.yaml": ["[]", "trainer: 5", f"{CONFIG}\nm: {MANY}"],
    ".hydra/config.yaml": ["a: [", "5"],
    "job.json": [[], {"number": 0}],
    "metrics.csv": [f"{METRICS}2,1e308\n3,-1e308\n", "step,$x$\n0,1\n1,2\n", "", f"{METRICS}2,1,2,3\n", "step\n0\n"],
}


def test_what_is_odd_in_a_run_is_left_out(runs: list[Path], tmp_path: Path) -> None:
    for number, (file, content) in enumerate((file, content) for file, contents in ODD.items() for content in contents):
        odd = _written(tmp_path / f"odd_{number}")
        (odd / file).write_text(content if isinstance(content, str) else json.dumps(content))
        runs.append(odd)
    assert list(page.write(runs, tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


def test_metrics_that_are_no_table_are_refused(runs: list[Path], tmp_path: Path) -> None:
    (runs[0] / "metrics.csv").write_text(f"step,train/loss\n0,{'9' * 200_000}\n")
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
