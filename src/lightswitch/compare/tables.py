"""Tables and a summary of a comparison, for the terminal, Markdown and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightswitch.compare.comparison import Comparison, Difference, Speed, choices, differences, speeds
from lightswitch.compare.run import Run
from lightswitch.errors import printable
from lightswitch.monitoring.display import aligned, compact, escaped
from lightswitch.monitoring.step_times import PHASES, StepTimes
from lightswitch.sweeps.record import FAILED

NOTHING = "–"


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


def tables(comparison: Comparison) -> list[Table]:
    """Return the non-empty tables of a comparison."""
    made = [_runs(comparison), _curves(comparison), _steps(comparison), _refused(comparison), _config(comparison)]
    return [table for table in made if table.rows or table.notes]


def summary(comparison: Comparison) -> list[str]:
    """Return the most important findings in a few sentences."""
    return [*_agreement(differences(comparison)), *_fastest(comparison), *_failures(comparison)]


# The summary


def _agreement(found: Sequence[Difference]) -> Iterator[str]:
    compared = [difference for difference in found if difference.step is not None]
    if not compared:
        yield "No curves can be compared: no metric was logged at a step that two runs have in common."
        return
    first = compared[0]
    if first.largest == 0:
        yield f"{first.metric} is the same at all {first.steps} common steps."
    elif math.isfinite(first.largest):
        yield f"{first.metric} differs by {number(first.largest)} at most, at step {first.step}."
    else:
        yield f"{first.metric} of {first.high} is not finite at step {first.step}, but that of {first.low} is."


def _fastest(comparison: Comparison) -> Iterator[str]:
    of_runs = [
        (speed.samples_per_second, speed, run)
        for run, speed in zip(comparison.runs, speeds(comparison), strict=True)
        if speed.samples_per_second is not None
    ]
    if len(of_runs) > 1:
        _, speed, run = max(of_runs, key=lambda found: found[0])
        yield f"{run.label} is the fastest: {_rate(speed)} per second."


def _failures(comparison: Comparison) -> Iterator[str]:
    failed = [run for run in comparison.runs if run.state == FAILED]
    if failed:
        yield f"{len(failed)} of {len(comparison.runs)} runs failed."


def _rate(speed: Speed) -> str:
    if speed.tokens_per_second is not None:
        return f"{compact(speed.tokens_per_second)} tokens"
    return f"{compact(speed.samples_per_second or 0)} samples"


# The tables


def _runs(comparison: Comparison) -> Table:
    of_runs = speeds(comparison)
    unit = "tokens" if any(speed.tokens_per_second is not None for speed in of_runs) else "samples"
    objective = comparison.objectives[0] if comparison.objectives else "objective"
    memory = ("peak memory", "planned") if _is_planned(comparison) else ("peak memory",)
    header = ("run", "devices", "steps", objective, f"{unit}/s", "ms/step", "efficiency", *memory, "start-up", "state")
    rows = [_row(run, speed, unit, objective, len(memory)) for run, speed in zip(comparison.runs, of_runs, strict=True)]
    alignment = "l" + "r" * (len(header) - 2) + "l"
    return Table("Runs", header, alignment, rows, tuple(_notes_on_runs(comparison, of_runs)))


def _is_planned(comparison: Comparison) -> bool:
    return any(run.planned_bytes is not None for run in comparison.runs)


def _row(run: Run, speed: Speed, unit: str, objective: str, columns_of_memory: int) -> tuple[str, ...]:
    planned = size(run.planned_bytes) if run.planned_bytes is not None else NOTHING
    rate = speed.tokens_per_second if unit == "tokens" else speed.samples_per_second
    curve = run.curves.get(objective, {})
    return (
        run.label,
        str(run.world_size or NOTHING),
        str(run.steps or NOTHING),
        f"{curve[max(curve)]:#.5g}" if curve else NOTHING,
        f"{rate:,.0f}" if rate is not None else NOTHING,
        milliseconds(speed.step_seconds),
        f"{100 * speed.efficiency:.0f} %" if speed.efficiency is not None else NOTHING,
        *(_peak(run), planned)[:columns_of_memory],
        f"{run.times.startup_seconds:.1f} s" if run.times is not None else NOTHING,
        run.state,
    )


def _peak(run: Run) -> str:
    if run.times is not None:
        return size(run.times.peak_bytes)
    logged = run.curves.get("memory/peak_gib", {}).values()
    return size(max(logged) * 2**30) if logged else NOTHING


def _notes_on_runs(comparison: Comparison, of_runs: Sequence[Speed]) -> Iterator[str]:
    if len(comparison.objectives) > 1:
        message = " and ".join(comparison.objectives)
        yield f"The runs have different objectives, {message}; the first is shown."
    yield "Speed: the median of the logged values, without validation and saves."
    yield "Efficiency: samples per second and device, relative to " + _base(comparison, of_runs)
    yield "Peak memory: " + _memory(comparison)
    if all(run.times is None for run in comparison.runs):
        message = "type compare=true in a sweep, or callbacks=[default,step_times] in a run"
        yield f"Start-up and the phases of a step were not measured: {message}."
    else:
        yield "Start-up: from the start of the process to the first batch."


def _base(comparison: Comparison, of_runs: Sequence[Speed]) -> str:
    alone = [
        (speed.samples_per_second, run)
        for run, speed in zip(comparison.runs, of_runs, strict=True)
        if run.world_size == 1 and speed.samples_per_second is not None
    ]
    if not alone:
        return "a run on one device, but none of these runs has one device and logged its speed."
    of_cpus = any(run.times is not None and not run.times.on_cuda for run in comparison.runs)
    label = max(alone, key=lambda found: found[0])[1].label
    return (
        f"{label}{'; on CPUs, several processes share the cores that a single process uses alone' if of_cpus else ''}."
    )


def _memory(comparison: Comparison) -> str:
    measured = [run.times for run in comparison.runs if run.times is not None]
    if not measured:
        return "of rank 0."
    kinds = {times.on_cuda for times in measured}
    where = {True: "on the device", False: "of the process on the host"}
    return f"{' or '.join(where[kind] for kind in sorted(kinds))}, of the rank with the highest use."


def _curves(comparison: Comparison) -> Table:
    header = ("metric", "common steps", "largest difference", "at step", "lowest", "highest")
    rows = [_difference(found) for found in differences(comparison)]
    notes = () if rows else ("No two runs have logged the same metric: metrics.csv is written by logger.csv.",)
    return Table("Curves", header, "lrrrll", rows, notes)


def _difference(found: Difference) -> tuple[str, ...]:
    if found.step is None:
        return (found.metric, "0", *4 * (NOTHING,))
    if found.largest == 0:
        return (found.metric, str(found.steps), "0", *3 * (NOTHING,))
    return (found.metric, str(found.steps), number(found.largest), str(found.step), found.low, found.high)


def _steps(comparison: Comparison) -> Table:
    measured = [(run, run.times) for run in comparison.runs if run.times is not None and run.times.measured_steps]
    header = ("run", *PHASES[:-1], "saving", PHASES[-1], "total", "overlapped")
    rows = [(run.label, *_phases(times)) for run, times in measured]
    if not rows:
        return Table("Time per step, in ms", header, "l" + "r" * (len(header) - 1), [])
    steps = sorted({times.measured_steps for _, times in measured})
    notes = (
        f"Measured over {' or '.join(map(str, steps))} steps of each run under torch's profiler, which slows them "
        "a little; the mean over ranks. Saving is spread over all steps.",
        "Communication: what did not overlap with computation, including waits for slower ranks. "
        "Overlapped: what did; it took no extra time.",
    )
    return Table("Time per step, in ms", header, "l" + "r" * (len(header) - 1), rows, notes)


def _phases(times: StepTimes) -> Iterator[str]:
    saving = times.saving_seconds_a_step
    for phase in PHASES[:-1]:
        yield milliseconds(times.seconds.get(phase, 0.0))
    yield milliseconds(saving)
    yield milliseconds(times.seconds.get(PHASES[-1], 0.0))
    yield milliseconds(sum(times.seconds.values()) + saving)
    yield milliseconds(sum(times.overlapped_seconds.values()))


def _refused(comparison: Comparison) -> Table:
    rows = [(run.label, run.failure) for run in comparison.runs if run.failure is not None]
    return Table("Refused or failed", ("run", "why"), "ll", rows)


def _config(comparison: Comparison) -> Table:
    labels = tuple(run.label for run in comparison.runs if run.config)
    rows = [(key, *values) for key, values in choices(comparison)]
    notes = () if rows or len(labels) < 2 else ("The configs are the same.",)
    return Table("Config differences", ("key", *labels), "l" * (1 + len(labels)), rows, notes)


# Numbers


def number(value: float) -> str:
    """Format a difference with two digits: 2.9e-06, 0.031, 1.4."""
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def milliseconds(seconds: float | None) -> str:
    """Format a time in milliseconds, without the unit: 0.43, 12.3, 1,240."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def size(count: float) -> str:
    """Format bytes with a unit: 612 MiB, 12.3 GiB."""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.3g} GiB"


def terminal(tables: Sequence[Table], summary: Sequence[str]) -> str:
    """Format tables in aligned columns, with the summary below them."""
    return printable("\n\n".join([*map(_aligned, tables), "\n".join(summary)]) + "\n")


def _aligned(table: Table) -> str:
    texts = [index for index, side in enumerate(table.alignment) if side == "l"]
    lines = aligned([table.columns, *table.rows], texts) if table.rows else []
    return "\n".join([table.title, *lines, *table.notes])


def markdown(title: str, tables: Sequence[Table], summary: Sequence[str]) -> str:
    """Format tables and summary as a Markdown document."""
    parts = [f"# {escaped(title)}", *map(escaped, summary)]
    for table in tables:
        parts += [f"## {table.title}", *(["\n".join(_rows(table))] if table.rows else []), *map(escaped, table.notes)]
    return "\n\n".join(parts) + "\n"


def _rows(table: Table) -> list[str]:
    rules = ("---:" if side == "r" else "---" for side in table.alignment)
    cells = [table.columns, tuple(rules), *table.rows]
    return [f"| {' | '.join(map(escaped, row))} |" for row in cells]
