"""Arithmetic on what was read of runs, each number by hand."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from lightswitch.compare import tables
from lightswitch.compare.comparison import Comparison, choices, difference, differences, speeds
from lightswitch.compare.run import Curve, Run, read
from lightswitch.errors import Refused
from lightswitch.monitoring.step_times import StepTimes
from lightswitch.runs import starts

TIMES = StepTimes(
    startup_seconds=4.25,
    world_size=2,
    on_cuda=True,
    peak_bytes=3 * 2**30,
    trained_steps=100,
    saving_seconds=0.25,
    measured_steps=5,
    seconds={"data": 1e-3, "forward": 0.01, "backward": 0.02, "communication": 6e-3, "optimizer": 2e-3, "rest": 5e-4},
    overlapped_seconds={"backward": 0.004, "optimizer": 0.001},
)


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
    runs = losses(whole={0: 4.0, 1: 3.0, 2: 2.0}, short={0: 4.0}, resumed={2: 2.0})
    assert tables.summary(Comparison(tuple(runs)))[0] == "train/loss is the same at all 2 common steps."


def test_curves_without_a_common_step_have_no_difference() -> None:
    comparison = Comparison(tuple(losses(a={0: 1.0}, b={1: 1.0})))
    assert [(found.steps, found.step) for found in differences(comparison)] == [(0, None)]
    assert tables.summary(comparison)[0].startswith("No curves can be compared")


def test_a_loss_that_is_no_number_is_the_largest_difference() -> None:
    for lost in (math.nan, math.inf):
        found = difference("train/loss", losses(sound={0: 1.0, 1: 1.0, 2: 1.0}, broken={0: 5.0, 1: lost, 2: lost}))
        assert (found.largest, found.step, found.low, found.high) == (math.inf, 1, "sound", "broken")
    assert difference("train/loss", losses(a={0: math.nan}, b={0: math.nan})).largest == 0


def test_a_run_that_goes_on_after_a_failure_has_not_failed(tmp_path: Path) -> None:
    """Its last start, which also tells the number of devices behind `devices=auto`, is later than the failure."""
    report, record = tmp_path / "crash" / "first" / "failure.txt", tmp_path / "run.json"
    report.parent.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("name: gpt\ntrainer: {devices: auto, num_nodes: 2}\n")
    report.write_text("RuntimeError: lost\nmore\n")
    record.write_text(json.dumps({"starts": starts.as_json([starts.Start(0, ["a", "b"], 4)])}))
    found = []
    for seconds in (60, -60):
        os.utime(report, (record.stat().st_mtime + seconds,) * 2)
        found.append([(run.state, run.failure, run.world_size) for run in read([tmp_path])])
    assert found == [[("failed", "RuntimeError: lost", 8)], [("not finished", None, 8)]]


def test_a_plan_is_that_of_the_runs_own_strategy_and_precision(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    choices = "hydra: {runtime: {choices: {strategy: ddp, precision: 32-true}}}"
    (tmp_path / ".hydra/hydra.yaml").write_text(choices)
    found = [read([tmp_path])[0].planned_bytes]
    for words in (["strategy=fsdp"], ["strategy=ddp"]), (["strategy=ddp", "precision=bf16-mixed"], ["strategy=ddp"]):
        strategies = [{"words": one, "bytes": number} for number, one in enumerate(words)]
        (tmp_path / "plan.json").write_text(json.dumps({"strategies": strategies}))
        found.append(read([tmp_path])[0].planned_bytes)
    assert found == [None, 1, 1]


def timed(label: str, devices: int, *samples_per_second: float) -> Run:
    logged = dict(enumerate(samples_per_second))
    curves = {
        "samples_per_second": logged,
        "tokens_per_second": {step: 64 * speed for step, speed in logged.items()},
        "step_seconds": {step: 32 / speed for step, speed in logged.items()},
    }
    return run(label, devices, curves={f"throughput/{name}": curve for name, curve in curves.items()})


def test_efficiency_is_the_speed_for_each_device_against_one_device() -> None:
    """Medians 100, 110, 320, 300: of the two on one device the faster counts; 320 / (4 × 110) = 0.727."""
    runs = (timed("slow", 1, 90, 100, 500), timed("fast", 1, 110), timed("ddp", 4, 320), timed("fsdp", 4, 280, 320))
    found = speeds(Comparison(runs))
    assert [speed.samples_per_second for speed in found] == [100, 110, 320, 300]
    assert [speed.efficiency for speed in found] == pytest.approx([100 / 110, 1.0, 320 / 440, 300 / 440])
    assert Comparison(runs).metrics == []
    (_, _, ddp, _) = tables.tables(Comparison(runs))[0].rows
    assert ddp == ("ddp", "4", "–", "–", "20,480", "100", "73 %", "–", "–", "finished")
    assert [speed.efficiency for speed in speeds(Comparison(runs[2:]))] == [None, None]


def test_saving_is_spread_over_all_steps_and_what_is_overlapped_takes_no_time() -> None:
    """0.25 s of saves over 100 steps are 2.5 ms; 1 + 10 + 20 + 6 + 2 + 2.5 + 0.5 = 42 ms; 4 + 1 = 5 ms beside."""
    comparison = Comparison((run("a", times=TIMES, planned_bytes=2 * 2**30), run("b")))
    runs, steps = (table for table in tables.tables(comparison) if table.title in ("Runs", "Time per step, in ms"))
    assert steps.columns[1:] == (
        *("data", "forward", "backward", "communication", "optimizer", "saving", "rest", "total", "overlapped"),
    )
    assert steps.rows == [("a", "1.00", "10.0", "20.0", "6.00", "2.00", "2.50", "0.50", "42.0", "5.00")]
    assert runs.rows[0][-4:] == ("3 GiB", "2 GiB", "4.2 s", "finished")


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


def test_the_judged_metric_is_found_by_the_name_that_the_module_logs(tmp_path: Path) -> None:
    for name in ("a/x", "b/x"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("name: resnet\nobjective: val/loss\n")
        (tmp_path / name / "metrics.csv").write_text("step,train/loss,val_loss\n0,2.0,\n9,1.0,0.125\n10,0.")
    comparison = Comparison(tuple(read([tmp_path / "a/x", tmp_path / "b/x"])))
    assert comparison.metrics == ["train/loss", "val_loss"]
    runs = tables.tables(comparison)[0]
    judged = runs.columns.index("val_loss")
    assert [(row[0], row[judged]) for row in runs.rows] == [("a/x", "0.12500"), ("b/x", "0.12500")]


def test_runs_of_several_names_are_refused() -> None:
    with pytest.raises(Refused, match="runs/gpt/a of gpt, runs/gpt/b of vit; compare runs with the same name"):
        Comparison((run("a"), run("b", name="vit")))
