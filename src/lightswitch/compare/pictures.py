"""Pictures of a comparison: curves laid over one another, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lightswitch import figures
from lightswitch.compare.comparison import Comparison
from lightswitch.compare.run import Curve, Run
from lightswitch.figures import DASHES, Picture, Theme
from lightswitch.monitoring.step_times import PHASES, StepTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 10.0
_PARTS = (*PHASES[:-1], "saving", PHASES[-1])
_COLORS = {"data": 4, "forward": 0, "backward": 2, "communication": 5, "optimizer": 1, "saving": 3}


def curves(comparison: Comparison) -> Picture | None:
    """Draw the training loss and the objective of all runs; below each, how far they are from the first run.

    None if no two runs have a metric in common.
    """
    shown = comparison.metrics[:2]
    if not shown:
        return None
    return figures.picture(partial(_draw_curves, comparison, shown), _WIDTH_INCHES, 4.6)


def steps(comparison: Comparison) -> Picture | None:
    """Draw a bar for each run whose steps were measured, cut into phases; None if there is no such run."""
    measured = [(run, run.times) for run in comparison.runs if run.times is not None and run.times.measured_steps]
    if not measured:
        return None
    return figures.picture(partial(_draw_steps, measured), _WIDTH_INCHES, 1.3 + 0.42 * len(measured))


def color(theme: Theme, index: int) -> str:
    """Return the colour of a run by its number in the comparison; beyond the theme's, they begin anew."""
    return theme.colors[index % len(theme.colors)]


def _draw_curves(comparison: Comparison, metrics: Sequence[str], figure: Figure, theme: Theme) -> None:
    axes = figure.subplots(2, len(metrics), squeeze=False, sharex="col", height_ratios=(3, 1.35))
    for column, metric in enumerate(metrics):
        of_runs = comparison.with_metric(metric)
        above, below = axes[0][column], axes[1][column]
        above.set_title(metric)
        for run in of_runs:
            _draw_curve(above, theme, comparison.runs.index(run), run.curves[metric], run.label)
        _draw_distances(below, theme, comparison, metric, of_runs)
        below.set_xlabel("step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)), handlelength=2.6)


def _draw_curve(axes: Axes, theme: Theme, index: int, curve: Curve, label: str) -> None:
    """Draw a line thinner than those below it: curves that are equal stay visible beside one another."""
    steps_in_order = sorted(curve)
    axes.plot(
        steps_in_order,
        [curve[step] for step in steps_in_order],
        color=color(theme, index),
        linewidth=max(1.2, 4.4 - 1.0 * index),
        linestyle=DASHES[min(index, 1)] if index else DASHES[0],
        marker="o" if len(steps_in_order) < 8 else "",
        markersize=max(3.0, 8 - 1.6 * index),
        label=label,
    )


def _draw_distances(axes: Axes, theme: Theme, comparison: Comparison, metric: str, of_runs: Sequence[Run]) -> None:
    base, *others = of_runs
    axes.set_title(f"distance from {base.label}", fontsize=9, color=theme.muted, pad=6)
    drawn = False
    for run in others:
        away = {step: abs(run.curves[metric][step] - base.curves[metric][step]) for step in _common(run, base, metric)}
        found = {step: distance for step, distance in sorted(away.items()) if math.isfinite(distance) and distance > 0}
        drawn = drawn or bool(found)
        axes.plot(
            list(found),
            list(found.values()),
            color=color(theme, comparison.runs.index(run)),
            linewidth=1.2,
            marker="o",
            markersize=3,
        )
    if drawn:
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color=theme.muted)


def _common(run: Run, other: Run, metric: str) -> set[int]:
    return run.curves[metric].keys() & other.curves[metric].keys()


def _draw_steps(measured: Sequence[tuple[Run, StepTimes]], figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    rows = range(len(measured))
    ends = [0.0 for _ in measured]
    for part in _PARTS:
        widths = [1000 * _seconds(times, part) for _, times in measured]
        shade = theme.colors[_COLORS[part]] if part in _COLORS else theme.rest
        axes.barh(rows, widths, left=ends, height=0.62, color=shade, label=part, linewidth=0.6)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        axes.text(end, row, f"  {end:,.0f} ms" if end >= 10 else f"  {end:.2g} ms", va="center", color=theme.ink)
    axes.set_yticks(rows, [run.label for run, _ in measured])
    axes.tick_params(axis="y", labelcolor=theme.ink)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.1 * max(ends))
    axes.set_xlabel("milliseconds a step")
    figure.legend(loc="outside upper left", ncols=len(_PARTS), handlelength=0.9, handleheight=0.9, columnspacing=1.4)


def _seconds(times: StepTimes, part: str) -> float:
    return times.saving_seconds_a_step if part == "saving" else times.seconds.get(part, 0.0)
