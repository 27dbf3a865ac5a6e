"""Tables of runs, and the most important of it in sentences, for the terminal and the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightswitch.compare.run import Curve, Run
from lightswitch.errors import printable
from lightswitch.monitoring import objective
from lightswitch.monitoring.display import aligned, compact
from lightswitch.monitoring.step_times import PHASES, StepTimes
from lightswitch.sweeps.record import FAILED

NOTHING = "–"
_NO_CHOICES = ("run_id", "compare", "trainer.default_root_dir")  # keys that only identify the run


@dataclass(frozen=True)
class Table:
    """Table of text cells.

    Args:
        alignment: l or r for each column.
        notes: sentences below the table.
    """

    title: str
    columns: tuple[str, ...]
    alignment: str
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def tables(runs: Sequence[Run]) -> list[Table]:
    """Return the non-empty tables of runs."""
    made = [_values(runs), _speed(runs), _steps(runs), _failed(runs), _config(runs)]
    return [table for table in made if table.rows]


def summary(runs: Sequence[Run]) -> list[str]:
    """Return the most important findings in a few sentences."""
    return [*_best(runs), *_fastest(runs), *_difference(runs), *_failures(runs)]


def terminal(tables: Sequence[Table], summary: Sequence[str]) -> str:
    """Format tables in aligned columns, with the summary below them."""
    return printable("\n\n".join([*map(_aligned, tables), "\n".join(summary)]) + "\n")


def _aligned(table: Table) -> str:
    texts = [index for index, side in enumerate(table.alignment) if side == "l"]
    return "\n".join([table.title, *aligned([table.columns, *table.rows], texts), *table.notes])


# Sentences


def _best(runs: Sequence[Run]) -> Iterator[str]:
    for metric in objectives(runs)[:1]:
        values = {run.label: best(metric, run.curves[metric]) for run in runs if run.curves.get(metric)}
        known = {label: value for label, value in values.items() if math.isfinite(value)}
        if len(set(known.values())) > 1:
            label = (min if objective.mode(metric) == "min" else max)(known, key=lambda label: known[label])
            yield f"{label} has the best {metric}: {_value(known[label])}."


def _fastest(runs: Sequence[Run]) -> Iterator[str]:
    speeds = {run.label: speed for run in runs if (speed := run.median("samples_per_second")) is not None}
    if len(speeds) > 1:
        label = max(speeds, key=lambda label: speeds[label])
        yield f"{label} is the fastest: {compact(speeds[label])} samples per second."


def _difference(runs: Sequence[Run]) -> Iterator[str]:
    """Yield how far the training losses of runs of one experiment are apart at the steps that all have logged."""
    curves = [run.curves["train/loss"] for run in runs if run.curves.get("train/loss")]
    steps = set.intersection(*(set(curve) for curve in curves)) if len(curves) > 1 else set()
    if not steps or len({run.name for run in runs if run.name is not None}) > 1:
        return
    apart = {step: _range([curve[step] for curve in curves]) for step in sorted(steps)}
    step = max(apart, key=lambda step: apart[step])
    if not math.isfinite(apart[step]):
        yield f"train/loss is not finite in some of the runs at step {step}."
    elif apart[step]:
        yield f"train/loss differs by {apart[step]:.2g} at most, at step {step}."
    else:
        yield f"train/loss is the same at all {len(steps)} common steps."


def _range(values: Sequence[float]) -> float:
    """Return the distance of the extremes; infinite if some, but not all, values are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values):
        return math.inf if finite else 0.0
    return max(finite) - min(finite)


def _failures(runs: Sequence[Run]) -> Iterator[str]:
    if failed := [run for run in runs if run.state == FAILED]:
        yield f"{len(failed)} of {len(runs)} runs failed."


# Values


def objectives(runs: Sequence[Run]) -> list[str]:
    """Return the distinct objectives of the runs."""
    return list(dict.fromkeys(run.objective for run in runs if run.objective is not None))


def metrics(runs: Sequence[Run]) -> list[str]:
    """Return all metrics: the objectives first, then by the stage that logs them."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    first = [name for name in objectives(runs) if name in names]
    stages = ("val", "test", "train")
    stage = {name: next((at for at, one in enumerate(stages) if name.startswith(one)), len(stages)) for name in names}
    return list(dict.fromkeys([*first, *sorted(names, key=lambda name: stage[name])]))


def best(metric: str, curve: Curve) -> float:
    """Return the lowest value, or the highest if the metric's name says so; not finite ones count if all are."""
    values = [value for value in curve.values() if math.isfinite(value)] or [*curve.values()]
    return min(values) if objective.mode(metric) == "min" else max(values)


def _values(runs: Sequence[Run]) -> Table:
    """Return each metric of each run; the metrics are the columns if there are more runs than metrics."""
    rows: list[tuple[str, ...]] = [("", *(run.label for run in runs))]
    for metric in metrics(runs):
        curves = [run.curves.get(metric, {}) for run in runs]
        if any(len(curve) > 1 for curve in curves) and not metric.startswith("train"):
            rows.append((f"{metric}, best", *(_value(best(metric, curve)) if curve else NOTHING for curve in curves)))
        rows.append((metric, *(_value(curve[max(curve)]) if curve else NOTHING for curve in curves)))
    header, *rows = zip(*rows, strict=True) if len(runs) > len(rows) - 1 else rows
    notes = ("The last value; best is the lowest, or the highest of a metric whose name says so, as accuracy.",)
    return Table("Values", header, "l" + "r" * (len(header) - 1), rows if len(header) > 1 else [], notes)


def _value(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not finite"


# Speed, memory, and where the time goes


def _speed(runs: Sequence[Run]) -> Table:
    unit = "tokens" if any(run.median("tokens_per_second") is not None for run in runs) else "samples"
    header = ("run", "devices", "steps", f"{unit}/s", "ms/step", "peak memory", "start-up", "state")
    rows = [
        (
            run.label,
            str(run.world_size or NOTHING),
            str(run.steps or NOTHING),
            f"{rate:,.0f}" if (rate := run.median(f"{unit}_per_second")) is not None else NOTHING,
            milliseconds(run.median("step_seconds")),
            _peak(run),
            f"{run.times.startup_seconds:.1f} s" if run.times is not None else NOTHING,
            run.state,
        )
        for run in runs
    ]
    notes: tuple[str, ...] = (
        "The median of the logged speeds, without validation and saves; the peak memory of the rank with the most.",
    )
    if all(run.times is None for run in runs):
        notes += ("compare=true measures the start-up and where a step's time goes.",)
    return Table("Speed and memory", header, "l" + "r" * (len(header) - 2) + "l", rows, notes)


def _peak(run: Run) -> str:
    logged = run.curves.get("memory/peak_gib", {}).values()
    count = run.times.peak_bytes if run.times is not None else max(logged, default=0) * 2**30
    if not count:
        return NOTHING
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.3g} GiB"


def _steps(runs: Sequence[Run]) -> Table:
    header = ("run", *PHASES[:-1], "saving", PHASES[-1], "total", "overlapped")
    measured = [(run.label, run.times) for run in runs if run.times is not None and run.times.measured_steps]
    rows = [(label, *map(milliseconds, _phases(times))) for label, times in measured]
    steps = sorted({times.measured_steps for _, times in measured})
    notes = (
        f"Measured over {' or '.join(map(str, steps))} steps of each run under torch's profiler, which slows them "
        "a little; the mean over ranks. Saving is spread over all steps.",
        "Communication: what did not overlap with computation, including waits for slower ranks. "
        "Overlapped: what did; it took no extra time.",
    )
    return Table("Time per step, in ms", header, "l" + "r" * (len(header) - 1), rows, notes)


def _phases(times: StepTimes) -> Iterator[float]:
    saving = times.saving_seconds_a_step
    yield from (times.seconds.get(phase, 0.0) for phase in PHASES[:-1])
    yield saving
    yield times.seconds.get(PHASES[-1], 0.0)
    yield sum(times.seconds.values()) + saving
    yield sum(times.overlapped_seconds.values())


def milliseconds(seconds: float | None) -> str:
    """Format a time in milliseconds, without the unit: 0.43, 12.3, 1,240."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


# Failures and configs


def _failed(runs: Sequence[Run]) -> Table:
    rows = [(run.label, run.failure) for run in runs if run.failure is not None]
    return Table("Refused or failed", ("run", "why"), "ll", rows)


def _config(runs: Sequence[Run]) -> Table:
    """Return the config keys whose values differ; runs without a config, which were refused early, are left out."""
    configured = [run for run in runs if run.config]
    keys = Counter(key for run in configured for key in run.config if key not in _NO_CHOICES)
    values = {key: [run.config.get(key, "-") for run in configured] for key in sorted(keys)}
    rows = [(key, *of_runs) for key, of_runs in values.items() if len(set(of_runs)) > 1]
    return Table("Config differences", ("key", *(run.label for run in configured)), "l" * (1 + len(configured)), rows)
