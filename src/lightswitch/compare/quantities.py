"""What runs are compared by, as text: values of metrics, speed and memory, time of a step, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightswitch.compare.run import Curve, Run
from lightswitch.monitoring import objective
from lightswitch.monitoring.display import compact

NOTHING = "–"
_NO_SETTINGS = ("run_id", "compare")  # keys that only identify the run
_NO_METRICS = ("throughput/", "memory/", "time/", "lr-")  # what the engine logs beside the module
_NOTES = {
    "Values": "Best is the lowest, or the highest of a metric whose name says so, as accuracy.",
    "Speed and memory": "The median of the logged speeds, without validation and saves; the peak memory of rank 0.",
    "Time of a step": "The medians that callbacks=[default,step_times] logged: data is the wait for a batch, rest what "
    "hooks do after the optimizer's step.",
}


Rows = dict[str, list[str]]  # a cell for each run, by the name of a quantity


@dataclass(frozen=True)
class Section:
    """Quantities of one kind, with a sentence for the page."""

    title: str
    rows: Rows

    @property
    def note(self) -> str:
        """Sentence for the page; empty if there is none."""
        return _NOTES.get(self.title, "")


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return values and speeds, then the non-empty ones of further sections."""
    first = [Section("Values", _values(runs)), Section("Speed and memory", _speed(runs))]
    others = [Section("Time of a step", _phases(runs)), Section("Settings that differ", _settings(runs))]
    return [*first, *(section for section in others if section.rows)]


def apart(runs: Sequence[Run]) -> str | None:
    """Return how far the training losses of runs of one experiment are apart at the steps that all have logged."""
    curves = [run.curves["train/loss"] for run in runs if run.curves.get("train/loss")]
    steps = set.intersection(*(set(curve) for curve in curves)) if len(curves) > 1 else set()
    if not steps or len({run.name for run in runs if run.name is not None}) > 1:
        return None
    found = {step: [curve[step] for curve in curves] for step in sorted(steps)}
    distances = {step: max(values) - min(values) if all(map(math.isfinite, values)) else math.inf
                 for step, values in found.items()}  # fmt: skip
    step = max(distances, key=distances.__getitem__)
    return f"train/loss differs by {distances[step]:.2g} at most, at step {step}."


def metrics(runs: Sequence[Run]) -> list[str]:
    """Return all metrics: the objectives first, then by the stage that logs them."""
    names = dict.fromkeys(name for run in runs for name in run.curves if not name.startswith(_NO_METRICS))
    first = [name for run in runs if (name := run.objective) in names]
    stages = ("val", "test", "train")
    stage = {name: next((at for at, one in enumerate(stages) if name.startswith(one)), len(stages)) for name in names}
    return list(dict.fromkeys([*first, *sorted(names, key=lambda name: stage[name])]))


def best(metric: str, curve: Curve) -> float:
    """Return the lowest value, or the highest if the metric's name says so; not finite ones count if all are."""
    values = [value for value in curve.values() if math.isfinite(value)] or [*curve.values()]
    return min(values) if objective.mode(metric) == "min" else max(values)


def _values(runs: Sequence[Run]) -> Rows:
    """Return the first and the last value of each metric of training, the best and the last of others."""
    rows: Rows = {}
    for metric in metrics(runs):
        curves = [run.curves.get(metric) for run in runs]
        if any(curve and len(curve) > 1 for curve in curves):
            if metric.startswith("train"):
                rows[f"{metric}, first"] = [_value(curve[min(curve)]) if curve else NOTHING for curve in curves]
            else:
                rows[f"{metric}, best"] = [_value(best(metric, curve)) if curve else NOTHING for curve in curves]
        rows[metric] = [_value(curve[max(curve)]) if curve else NOTHING for curve in curves]
    return rows


def _value(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not finite"


def _speed(runs: Sequence[Run]) -> Rows:
    unit = "tokens" if any(run.median("throughput/tokens_per_second") is not None for run in runs) else "samples"
    rates = [run.median(f"throughput/{unit}_per_second") for run in runs]
    rows = {
        "devices": [str(run.devices or NOTHING) for run in runs],
        "steps": [str(run.steps or NOTHING) for run in runs],
        f"{unit}/s": [NOTHING if rate is None else compact(rate) for rate in rates],
        "ms/step": [_ms(run.median("throughput/step_seconds")) for run in runs],
        "peak memory": [f"{run.peak_bytes / 2**30:.3g} GiB" if run.peak_bytes else NOTHING for run in runs],
        "state": [run.state for run in runs],
    }
    return {name: cells for name, cells in rows.items() if {*cells} != {NOTHING}}


def _phases(runs: Sequence[Run]) -> Rows:
    """Return the median time of each phase that a run has logged."""
    names = dict.fromkeys(name for run in runs for name in run.curves if name.startswith("time/"))
    return {f"{name.removeprefix('time/')}, ms": [_ms(run.median(name)) for run in runs] for name in names}


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else compact(1000 * seconds)


def _settings(runs: Sequence[Run]) -> Rows:
    """Return the config keys whose values differ; a run without a config, which was refused early, has none."""
    keys = sorted({key for run in runs for key in run.config if key not in _NO_SETTINGS})
    rows = {key: [run.config.get(key, NOTHING) for run in runs] for key in keys}
    known = [at for at, run in enumerate(runs) if run.config]
    rows = {key: cells for key, cells in rows.items() if len({cells[at] for at in known}) > 1}
    classes = {
        key: [cell.rpartition(".")[2] for cell in cells] for key, cells in rows.items() if key.endswith("_target_")
    }
    return rows | {key: names for key, names in classes.items() if len({*names}) > 1}
