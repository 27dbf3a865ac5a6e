"""Arithmetic on what was read of runs, each number by hand."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from lightswitch.compare import tables
from lightswitch.compare.comparison import Comparison, choices, difference, differences, speeds
from lightswitch.compare.page import draw_curves, draw_steps
from lightswitch.compare.run import Curve, Run, read
from lightswitch.errors import Refused
from lightswitch.monitoring.step_times import StepTimes
from lightswitch.runs import starts


def run(label: str, devices: int = 1, **fields: Any) -> Run:
    config = {"trainer.devices": str(devices), "trainer.num_nodes": "1", **fields.pop("config", {})}
    found = {"state": "finished", "name": "gpt", "objective": "val/loss", **fields}
    return Run(Path("runs/gpt") / label, label, config=config, **found)


def losses(**curves: Curve) -> list[Run]:
    return [run(label, curves={"train/loss": curve}) for label, curve in curves.items()]


def test_the_largest_difference_is_between_the_extremes_of_a_step_that_two_have() -> None:
    """At 19 the three are 3.0, 3.25 and 2.5, 0.75 apart; at 29, two are 0.125 apart, then 0.875; at 39, one is left."""
    curves = {"a": {9: 4.0, 19: 3.0, 29: 1.0}, "b": {9: 4.25, 19: 3.25}, "c": {9: 4.0, 19: 2.5, 29: 1.125, 39: 9.0}}
    found = difference("train/loss", losses(**curves))
    assert (found.steps, found.largest, found.step, found.low, found.high) == (3, 0.75, 19, "c", "b")
    found = difference("train/loss", losses(**{**curves, "c": {**curves["c"], 29: 1.875}}))
    assert (found.steps, found.largest, found.step, found.low, found.high) == (3, 0.875, 29, "a", "c")


def test_runs_of_which_no_step_is_of_all_are_compared() -> None:
    runs = losses(whole={0: 4.0, 1: 3.0, 2: 2.0}, short={0: 4.0}, resumed={2: 2.0})
    assert tables.summary(Comparison(tuple(runs)))[0] == "train/loss is the same at all 2 common steps."


def test_a_run_that_goes_on_after_a_failure_has_not_failed(tmp_path: Path) -> None:
    """Its last start, which also tells the number of devices behind `devices=auto`, is later than the failure."""
    report, record = tmp_path / "crash" / "first" / "failure.txt", tmp_path / "run.json"
    report.parent.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("name: gpt\ntrainer: {devices: auto, num_nodes: 2}\n")
    report.write_text("RuntimeError: lost\n")
    record.write_text(json.dumps({"starts": starts.as_json([starts.Start(0, ["a", "b"], 4)])}))
    found = []
    for seconds in (60, -60):
        os.utime(report, (record.stat().st_mtime + seconds,) * 2)
        found.append([(run.state, run.failure, run.world_size) for run in read([tmp_path])])
    assert found == [[("failed", "RuntimeError: lost", 8)], [("not finished", None, 8)]]


def test_a_resumed_half_is_compared_where_both_are() -> None:
    found = difference("train/loss", losses(whole={0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}, half={2: 2.0, 3: 1.5}))
    assert (found.steps, found.largest, found.step, found.low, found.high) == (2, 0.5, 3, "whole", "half")


def test_curves_without_a_common_step_have_no_difference() -> None:
    comparison = Comparison(tuple(losses(a={0: 1.0}, b={1: 1.0})))
    assert [(found.steps, found.step) for found in differences(comparison)] == [(0, None)]
    assert tables.summary(comparison)[0].startswith("No curves can be compared")


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_the_largest_difference(lost: float) -> None:
    found = difference("train/loss", losses(sound={0: 1.0, 1: 1.0, 2: 1.0}, broken={0: 5.0, 1: lost, 2: lost}))
    assert (found.largest, found.step, found.low, found.high) == (math.inf, 1, "sound", "broken")
    assert tables.number(found.largest) == "not finite"


def test_what_all_have_lost_alike_is_no_difference() -> None:
    assert difference("train/loss", losses(a={0: math.nan}, b={0: math.nan})).largest == 0


def test_metrics_of_speed_and_those_of_one_run_are_no_curves() -> None:
    curves = {
        "throughput/step_seconds": {9: 1.0},
        "memory/peak_gib": {9: 1.0},
        "lr-AdamW": {9: 1.0},
        "val/loss": {9: 1.0},
    }
    comparison = Comparison((run("a", curves=curves), run("b", curves={**curves, "train/loss": {9: 1.0}})))
    assert comparison.metrics == ["val/loss"]


def timed(label: str, devices: int, *samples_per_second: float) -> Run:
    logged = {step: speed for step, speed in enumerate(samples_per_second)}
    tokens = {step: 64 * speed for step, speed in logged.items()}
    seconds = {step: 32 / speed for step, speed in logged.items()}
    names = ("samples_per_second", "tokens_per_second", "step_seconds")
    return run(
        label,
        devices,
        curves={f"throughput/{name}": curve for name, curve in zip(names, (logged, tokens, seconds), strict=True)},
    )


def test_efficiency_is_the_speed_for_each_device_against_one_device() -> None:
    """Medians 100, 110, 320, 300: of the two on one device the faster counts; 320 / (4 × 110) = 0.727."""
    runs = (timed("slow", 1, 90, 100, 500), timed("fast", 1, 110), timed("ddp", 4, 320), timed("fsdp", 4, 280, 320))
    found = speeds(Comparison(runs))
    assert [speed.samples_per_second for speed in found] == [100, 110, 320, 300]
    assert [speed.efficiency for speed in found] == pytest.approx([100 / 110, 1.0, 320 / 440, 300 / 440])
    assert (found[2].tokens_per_second, found[2].step_seconds) == (20_480, 0.1)
    (_, _, ddp, _) = tables.tables(Comparison(runs))[0].rows
    assert ddp == ("ddp", "4", "–", "–", "20,480", "100", "73 %", "–", "–", "finished")


def test_without_a_run_on_one_device_there_is_no_efficiency() -> None:
    comparison = Comparison((timed("a", 2, 10), timed("b", 4, 20)))
    assert [speed.efficiency for speed in speeds(comparison)] == [None, None]
    assert "a run on one device, but none of these runs has one device" in " ".join(tables.tables(comparison)[0].notes)


TIMES = StepTimes(
    startup_seconds=4.25,
    world_size=2,
    on_cuda=True,
    peak_bytes=3 * 2**30,
    trained_steps=100,
    saving_seconds=0.25,
    measured_steps=5,
    seconds={
        "data": 0.001,
        "forward": 0.01,
        "backward": 0.02,
        "communication": 0.006,
        "optimizer": 0.002,
        "rest": 0.0005,
    },
    overlapped_seconds={"backward": 0.004, "optimizer": 0.001},
)


def test_saving_is_spread_over_all_steps_and_what_is_overlapped_takes_no_time() -> None:
    """0.25 s of saves over 100 steps are 2.5 ms; 1 + 10 + 20 + 6 + 2 + 2.5 + 0.5 = 42 ms; 4 + 1 = 5 ms beside."""
    comparison = Comparison((run("a", times=TIMES), run("b")))
    runs, steps = (table for table in tables.tables(comparison) if table.title in ("Runs", "Time per step, in ms"))
    assert steps.columns[1:] == (
        *("data", "forward", "backward", "communication", "optimizer", "saving", "rest", "total", "overlapped"),
    )
    assert steps.rows == [("a", "1.00", "10.0", "20.0", "6.00", "2.00", "2.50", "0.50", "42.0", "5.00")]
    assert runs.rows[0][-3:] == ("3 GiB", "4.2 s", "finished")
    assert "Peak memory: on the device, of the rank with the highest use." in runs.notes


def test_what_was_planned_stands_beside_what_was_taken() -> None:
    comparison = Comparison((run("a", times=TIMES, planned_bytes=2 * 2**30), run("b")))
    runs = tables.tables(comparison)[0]
    memory = [row[runs.columns.index("peak memory") : runs.columns.index("start-up")] for row in runs.rows]
    assert memory == [("3 GiB", "2 GiB"), ("–", "–")]


def test_configs_are_beside_one_another_where_they_differ() -> None:
    first = run("a", 1, config={"optimizer.lr": "0.001", "seed": "1", "run_id": "a"})
    second = run("b", 2, config={"seed": "1", "run_id": "b"})
    failed = Run(Path("runs/gpt/c"), "c", "failed", failure="error: no")
    comparison = Comparison((first, second, failed))
    assert dict(choices(comparison)) == {"trainer.devices": ["1", "2"], "optimizer.lr": ["0.001", "-"]}
    by_title = {table.title: table for table in tables.tables(comparison)}
    assert by_title["Config differences"].columns == ("key", "a", "b")
    assert by_title["Refused or failed"].rows == [("c", "error: no")]
    assert "1 of 3 runs failed." in tables.summary(comparison)


def test_pictures_show_labels_as_they_are_and_leave_out_what_is_no_number() -> None:
    odd = run("_$x$ & <b>", curves={"train/loss": {0: 1.0, 1: math.nan, 2: 1.5}}, times=TIMES)
    long = run("trainer.strategy.activation_checkpointing=true seed=1", curves={"train/loss": {0: 1.0, 1: 1.0, 2: 1.0}})
    comparison = Comparison((odd, long))
    drawn = [*draw_curves(comparison), *draw_steps(comparison)]
    assert len(drawn) == 2
    for picture in drawn:
        assert "_$x$ & <b>" in ElementTree.fromstring(picture.light).itertext()
    assert "trainer.strategy.activation_checkpointing=true …" in drawn[0].dark


def test_letters_of_pictures_are_readable_on_a_phone() -> None:
    """Of 390 pixels a page leaves 366 to a picture; 10 pixels are 7.5 points on paper."""
    comparison = Comparison(tuple(run(name, curves={"train/loss": {0: 1.0, 1: 2.0}}, times=TIMES) for name in "ab"))
    for picture in (*draw_curves(comparison), *draw_steps(comparison)):
        width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', picture.light)[0])
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", picture.light)]
        assert sizes
        assert min(sizes) * 366 / width >= 9.0


def test_a_change_of_machines_is_a_mark_in_the_curves() -> None:
    curve, other = {0: 1.0, 1: 2.0, 2: 1.5}, run("other", curves={"train/loss": {0: 1.0, 1: 1.0, 2: 1.0}})
    marks = []
    for changes in ((), (1,), (1, 2)):
        (picture,) = draw_curves(Comparison((run("changed", curves={"train/loss": curve}, changes=changes), other)))
        marks.append(picture.light.count("stroke-dasharray"))
    assert marks == [marks[0], marks[0] + 1, marks[0] + 2]


def test_there_is_no_picture_of_nothing() -> None:
    comparison = Comparison((run("a"), run("b")))
    assert (draw_curves(comparison), draw_steps(comparison)) == ([], [])


def test_the_judged_metric_is_found_by_the_name_that_the_module_logs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("name: resnet\nobjective: val/loss\n")
        (tmp_path / name / "metrics.csv").write_text("step,train/loss,val_loss\n0,2.0,\n9,1.0,0.125\n")
    comparison = Comparison(tuple(read([tmp_path / "a", tmp_path / "b"])))
    assert comparison.metrics == ["train/loss", "val_loss"]
    runs = tables.tables(comparison)[0]
    assert [row[runs.columns.index("val_loss")] for row in runs.rows] == ["0.12500", "0.12500"]


def test_runs_of_several_names_are_refused() -> None:
    with pytest.raises(Refused, match="runs/gpt/a of gpt, runs/gpt/b of vit; compare runs with the same name"):
        Comparison((run("a"), run("b", name="vit")))


def test_one_run_is_not_compared() -> None:
    with pytest.raises(Refused, match="found one run, runs/gpt/a, expected two or more"):
        Comparison((run("a"),))


def test_different_objectives_are_told() -> None:
    comparison = Comparison((run("a"), run("b", objective="val/accuracy")))
    told = "The runs have different objectives, val/loss and val/accuracy; the first is shown."
    assert told in tables.tables(comparison)[0].notes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0, "0.00"), (0.00043, "0.43"), (0.00996, "10.0"), (0.0123, "12.3"), (1.2404, "1,240")],
)
def test_milliseconds_have_three_digits(seconds: float | None, text: str) -> None:
    assert tables.milliseconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(612 * 2**20, "612 MiB"), (12.34 * 2**30, "12.3 GiB"), (2**30, "1 GiB")])
def test_memory_is_in_binary_units(count: float, text: str) -> None:
    assert tables.size(count) == text
