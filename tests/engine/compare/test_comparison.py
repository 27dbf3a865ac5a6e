"""Arithmetic on what was read of runs, each number by hand."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightswitch.compare import page
from lightswitch.compare.quantities import apart, metrics, sections
from lightswitch.compare.run import Curve, Run, read
from lightswitch.monitoring.step_times import StepTimes
from lightswitch.runs.resume import Start

TIMES = StepTimes(
    startup_seconds=4.25,
    world_size=2,
    peak_bytes=3 * 2**30,
    trained_steps=100,
    saving_seconds=0.0025,
    measured_steps=5,
    seconds={"data": 1e-3, "forward": 0.01, "backward": 0.02, "communication": 6e-3, "optimizer": 2e-3, "rest": 5e-4},
    overlapped_seconds=0.005,
)


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
    assert apart(losses(a={0: 4.0, 1: 3.0}, b={0: 4.0})) == "train/loss is the same at all 1 common steps."
    assert apart(losses(a={0: 1.0}, b={1: 1.0})) is None
    assert apart([runs[0], run("vit", name="vit", curves=runs[1].curves)]) is None


def test_a_loss_that_is_no_number_is_the_largest_difference() -> None:
    for lost in (math.nan, math.inf):
        runs = losses(sound={0: 1.0, 1: 1.0, 2: 1.0}, broken={0: 5.0, 1: lost, 2: lost})
        assert apart(runs) == "train/loss is not finite in some of the runs at step 1."
    assert "the same" in str(apart(losses(a={0: math.nan}, b={0: math.nan})))


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


def test_saving_is_in_the_total_of_a_step_and_what_is_overlapped_takes_no_time() -> None:
    """1 + 10 + 20 + 6 + 2 + 2.5 + 0.5 = 42 ms, and 5 ms beside."""
    runs = [run("a", times=TIMES), run("b", 2)]
    phases = ["data", "forward", "backward", "communication", "optimizer", "rest", "saving", "total", "overlapped"]
    measured = ["1", "10", "20", "6", "2", "0.5", "2.5", "42", "5"]
    expected = {f"{phase}, ms": [value, "–"] for phase, value in zip(phases, measured, strict=True)}
    assert rows(runs, "Time of a step") == expected
    speeds = rows(runs, "Speed and memory")
    assert (speeds["peak memory"], speeds["start-up"]) == (["3 GiB", "–"], ["4.2 s", "–"])


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
