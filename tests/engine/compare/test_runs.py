"""Runs beside one another as `python -m lightswitch.compare` shows them: real ones, their halves, and what is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightswitch.compare import page
from lightswitch.compare.__main__ import main
from lightswitch.compare.run import Run, find, read
from tests.engine.conftest import CHECKOUT, PLAIN, runs_in
from tests.engine.tiny import LANGUAGE

SHORT = (
    *LANGUAGE,
    "trainer.accelerator=cpu",
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
    "callbacks=[default,step_times]",
    "callbacks.step_times.skip_steps=4",
    "callbacks.last_checkpoint.every_n_steps=10",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one device, one on two, and one that went on from the first one's tenth step."""
    folder = tmp_path_factory.mktemp("runs")
    train = runs_in(folder)
    train(*SHORT, "run_id=single", "strategy=single", folder=folder)
    train(*SHORT, "run_id=ddp", "strategy=ddp", folder=folder, ranks=2)
    resumed = f"resume={folder}/runs/languagemodel/single/checkpoints/step_10.ckpt"
    train(*SHORT, "run_id=half", "strategy=single", resumed, folder=folder)
    return folder / "runs" / "languagemodel"


def _compared(*paths: Path, output: Path) -> tuple[str, str]:
    """The tables on the terminal, and the page."""
    told = "\n".join(page.write(list(paths), output))
    return told, output.read_text()


def test_a_switch_that_does_not_change_the_run_shows_equal_curves(runs: Path, tmp_path: Path) -> None:
    told, page = _compared(runs / "single", runs / "ddp", output=tmp_path / "page.html")
    (row,) = re.findall(r"^train/loss +20 +(\S+)", told, re.MULTILINE)
    assert float(row) <= 1e-5
    assert re.search(r"^ddp +2 +20 +[\d.]+ +[\d,]+ +[\d.,]+ +\d+ % +\d+ MiB +[\d.]+ s +finished$", told, re.MULTILINE)
    assert re.search(r"^trainer.strategy._target_ +\S+Single +\S+DDP$", told, re.MULTILINE)
    assert not re.search(r"^(run_id|callbacks\.|logger\.)", told, re.MULTILINE)
    steps = {row.split()[0]: row.split() for row in re.findall(r"^(?:single|ddp) (?: +[\d.]+){9}$", told, re.MULTILINE)}
    assert float(steps["single"][4]) == 0
    assert float(steps["ddp"][4]) > 0
    assert page.count("<svg") == 6  # two curves and the phases, each in light and dark


def test_a_resumed_half_is_laid_over_the_whole(runs: Path, tmp_path: Path) -> None:
    told, _ = _compared(runs / "single", runs / "half", output=tmp_path / "page.html")
    assert re.search(r"^train/loss +10 +0 +– +–", told, re.MULTILINE)
    assert re.search(r"^resume +auto +\S+/step_10.ckpt$", told, re.MULTILINE)
    (half,) = read([runs / "half"])
    assert (half.steps, half.times and half.times.trained_steps) == (20, 10)


def test_the_page_is_whole_and_needs_nothing_else(runs: Path, tmp_path: Path) -> None:
    _, page = _compared(runs / "single", runs / "ddp", output=tmp_path / "page.html")
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert not reader.others, "loaded from elsewhere"
    assert not {"script", "link", "img", "iframe"} & reader.tags
    assert {"train/loss", "single", "ddp", "backward"} <= set(reader.texts)
    assert "@media (prefers-color-scheme: dark)" in page


class _Reader(HTMLParser):
    """Elements that are not closed, in which order they were opened, and addresses that a browser would load."""

    EMPTY = ("meta", "wbr", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.others: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [tag] if tag not in self.EMPTY else []
        self.others += [value or "" for name, value in attrs if name.endswith(("src", "href")) and value[:1] != "#"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        self.others += re.findall(r"url\((?!#)|@import", data)


def test_markdown_has_the_same_tables(runs: Path, tmp_path: Path) -> None:
    _compared(runs / "single", runs / "ddp", output=tmp_path / "page.html")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# languagemodel: 2 runs compared\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Runs",
        "Curves",
        "Time per step, in ms",
        "Config differences",
    ]
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


def test_without_a_file_the_page_lies_beside_the_runs(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parents[1])
    main(["runs/languagemodel/single", "runs/languagemodel/ddp"])
    assert capsys.readouterr().out.endswith(
        "page       runs/languagemodel/compare.html\nmarkdown   runs/languagemodel/compare.md\n"
    )
    assert (runs / "compare.html").exists()


def test_without_matplotlib_the_tables_still_come(runs: Path, tmp_path: Path) -> None:
    """Python documents that None in sys.modules hides a module; find_spec then finds none."""
    script = (
        "import importlib.util as util, sys; found = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'matplotlib' else found(name, *rest)\n"
        f"from lightswitch.compare.__main__ import main; main({[str(runs / 'single'), str(runs / 'ddp')]} "
        f"+ ['-o', {str(tmp_path / 'page.html')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    line = "pictures are left out: matplotlib is not installed; type pip install -e '.[plots]'"
    assert (done.returncode, done.stderr) == (0, "")
    assert line in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "<svg" not in page
    assert "matplotlib is not installed" in page
    assert "<td>single</td>" in page


# Runs that are none, or not whole


def _answer(*words: object, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_can_not_be_compared_is_told_in_a_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, other = tmp_path / "missing", tmp_path / "other"
    other.mkdir()
    assert _answer(missing, runs / "ddp", capsys=capsys) == (
        f"error: {missing}: there is no such directory; give run directories, as runs/NAME/RUN_ID\n"
    )
    assert _answer(other, runs / "ddp", capsys=capsys) == (
        f"error: {other} is not a run directory: it has no config.yaml; "
        "give run directories, as runs/NAME/RUN_ID, or a sweep's directory\n"
    )
    assert _answer(runs / "ddp", f"{runs}/../languagemodel/ddp", capsys=capsys) == (
        f"error: found one run, {runs}/../languagemodel/ddp, expected two or more; give another run directory\n"
    )
    shutil.copytree(runs / "ddp", tmp_path / "vit", ignore=shutil.ignore_patterns("checkpoints"))
    config = tmp_path / "vit" / "config.yaml"
    config.write_text(config.read_text().replace("name: languagemodel", "name: vit"))
    assert "compare runs with the same name" in _answer(tmp_path / "vit", runs / "ddp", capsys=capsys)
    assert "end it with .html" in _answer(runs / "ddp", "-o", "page.md", capsys=capsys)
    assert "there is no folder" in _answer(runs / "ddp", "-o", tmp_path / "no" / "page.html", capsys=capsys)


def test_a_page_replaces_no_file_but_of_a_comparison(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("single", "ddp"):
        shutil.copytree(runs / name, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "README.md").write_text("# mine\n")
    told = _answer(*tmp_path.iterdir(), "-o", tmp_path / "README.html", capsys=capsys)
    assert "README.md exists already, and is of no comparison" in told
    assert (tmp_path / "README.md").read_text() == "# mine\n"
    for _ in range(2):  # the second finds the page of the first among what a shell's * gives
        main([*map(str, tmp_path.iterdir())])
    assert (tmp_path / "compare.md").read_text().startswith("# languagemodel: 2 runs compared\n")


def test_a_run_without_metrics_is_a_row_and_a_word(runs: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        shutil.copy(runs / "ddp" / "config.yaml", tmp_path / name)
    told, page = _compared(tmp_path / "first", tmp_path / "second", output=tmp_path / "page.html")
    assert re.search(r"^first +2 +–(?: +–)+ +not finished$", told, re.MULTILINE)
    assert "No two runs have logged the same metric: metrics.csv is written by logger.csv." in told
    assert "<svg" not in page


def test_a_line_that_is_being_written_is_left_out(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "single", tmp_path / "going_on", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "going_on" / "ended.json").unlink()
    with (tmp_path / "going_on" / "metrics.csv").open("a") as file:
        file.write("21,504,0,0.00")
    (found,) = read([tmp_path / "going_on"])
    assert max(found.curves["train/loss"]) == 19
    assert found.state == "not finished"


def test_a_crash_is_told_by_its_first_line(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "single", tmp_path / "crashed", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "crashed" / "ended.json").unlink()
    for time, line in (("2026-01-01_00-00-00", "an earlier one"), ("2026-01-02_00-00-00", "rank 1 of 2 failed\nmore")):
        (tmp_path / "crashed" / "crash" / time).mkdir(parents=True)
        (tmp_path / "crashed" / "crash" / time / "failure.txt").write_text(line)
    (found,) = read([tmp_path / "crashed"])
    assert (found.state, found.failure) == ("failed", "rank 1 of 2 failed")


def test_a_plan_is_that_of_the_runs_own_strategy(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "ddp" / ".hydra", tmp_path / ".hydra")
    shutil.copy(runs / "ddp" / "config.yaml", tmp_path)
    assert read([tmp_path])[0].planned_bytes is None
    planned = {"fsdp": 100, "ddp": 200}
    strategies = [{"words": [f"strategy={name}"], "bytes": count} for name, count in planned.items()]
    (tmp_path / "plan.json").write_text(json.dumps({"strategies": strategies}))
    assert read([tmp_path])[0].planned_bytes == 200
    for number, precision in enumerate(("bf16-mixed", "32-true")):  # which is the run's
        strategies[number] = {"words": ["strategy=ddp", f"precision={precision}"], "bytes": number}
    (tmp_path / "plan.json").write_text(json.dumps({"strategies": strategies}))
    assert read([tmp_path])[0].planned_bytes == 1
    (tmp_path / "plan.json").write_text("[]")
    assert read([tmp_path])[0].planned_bytes is None


def test_runs_are_told_apart_by_the_end_of_their_path(runs: Path, tmp_path: Path) -> None:
    for folder in ("a/x", "b/x"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(runs / "ddp" / "config.yaml", tmp_path / folder)
    assert [run.label for run in read([tmp_path / "a/x", tmp_path / "b/x"])] == ["a/x", "b/x"]


# Sweeps


def test_a_sweep_that_compares_ends_with_its_page(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *("python", str(CHECKOUT / "train.py"), "-m", *PLAIN, "run_id=x", "compare=true"),
            *(
                "strategy=single,ddp",
                "trainer.devices=2",
                "trainer.max_steps=20",
                "trainer.val_check_interval=10",
            ),
            *("trainer.accelerator=cpu", "logger=csv", "~callbacks.lr_monitor", "trainer.log_every_n_steps=2"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    sweep = tmp_path / "runs/plainmodel/x"
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("page       runs/plainmodel/x/compare.html\nmarkdown   runs/plainmodel/x/compare.md\n")
    single, ddp = read(find([sweep]))
    assert (single.label, ddp.label) == ("single", "ddp")
    assert (single.state, single.failure) == ("failed", json.loads((sweep / "0/job.json").read_text())["error"])
    assert re.search(r"^single +error: strategy=single uses one device", done.stdout, re.MULTILINE)
    assert single.config == {}
    assert ddp.times is not None
    assert (ddp.times.world_size, ddp.times.measured_steps) == (2, 5)
    assert ddp.times.startup_seconds > 1  # it imports torch


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_a_switch_that_is_none_is_refused(flags: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["python", str(CHECKOUT / "train.py"), *flags, "compare=both"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert (done.returncode, done.stderr) == (2, "error: compare=both: found str, expected true or false\n")
    assert not list(tmp_path.iterdir())


def test_a_run_that_logs_nothing_of_its_training_has_the_steps_of_its_end(tmp_path: Path) -> None:
    limits = {"max_steps": 7, "max_epochs": None, "max_time": None}
    (tmp_path / "ended.json").write_text(json.dumps({"step": 7, "limits": limits, "go_on": None}))
    assert [Run(path, "mine", "finished").steps for path in (tmp_path, tmp_path / "other")] == [7, None]
