"""Pictures of a comparison: curves laid over one another, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lightswitch import figures
from lightswitch.compare.comparison import Comparison
from lightswitch.compare.run import Curve, Run
from lightswitch.compare.tables import milliseconds
from lightswitch.errors import printable
from lightswitch.figures import Picture, Theme
from lightswitch.monitoring.step_times import PHASES, StepTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 4.5  # 432 pixels: two beside one another on a page, and one on a phone, whose letters stay readable
_FEW_STEPS = 8  # of a curve: then each gets a dot
_LETTERS, _LONGEST = 54, 48  # in the picture's width, and in a label
_LONGEST_BASE = 26  # of the run that others are held against, in a title
_MOST_SLOTS, _DASH = 3, 2.5  # dashes are measured in line widths
_PARTS = (*PHASES[:-1], "saving", PHASES[-1])
_COLORS = {"data": 4, "forward": 0, "backward": 2, "communication": 5, "optimizer": 1, "saving": 3}


def curves(comparison: Comparison) -> list[Picture]:
    """Draw the training loss and the objective, each in a picture: all runs, and below how far they are from the first.

    Nothing if no two runs have a metric in common.
    """
    drawn = [run for run in comparison.runs if run.curves]
    height_inches = 4.2 + 0.2 * math.ceil(len(drawn) / _legend_columns(drawn)) if drawn else 0.0
    return [
        figures.picture(partial(_draw_curves, comparison, drawn, metric), _WIDTH_INCHES, height_inches)
        for metric in comparison.metrics[:2]
    ]


def steps(comparison: Comparison) -> list[Picture]:
    """Draw a bar for each run whose steps were measured, cut into phases; nothing if there is no such run."""
    measured = [(run, run.times) for run in comparison.runs if run.times is not None and run.times.measured_steps]
    if not measured:
        return []
    return [figures.picture(partial(_draw_steps, measured), _WIDTH_INCHES, 1.5 + 0.5 * len(measured))]


def _color(theme: Theme, index: int) -> str:
    """Return the colour of a run; beyond the theme's, they begin anew."""
    return theme.colors[index % len(theme.colors)]


def _label(run: Run, longest: int = _LONGEST) -> str:
    """Return a run's label, cut to the room there is, in letters."""
    return _plain(run.label if len(run.label) <= longest else f"{run.label[: longest - 1]}…")


def _plain(text: str) -> str:
    """Return a text as one line with its dollars as they are: matplotlib reads formulas."""
    return " ".join(printable(text).split()).replace("$", r"\$")


def _legend_columns(runs: Sequence[Run]) -> int:
    longest = max(len(_label(run)) for run in runs)
    return max(1, min(len(runs), _LETTERS // (longest + 6)))


def _draw_curves(comparison: Comparison, drawn: Sequence[Run], metric: str, figure: Figure, theme: Theme) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.35))
    of_runs = comparison.with_metric(metric)
    above.set_title(_plain(metric))
    for run in of_runs:
        _draw_curve(above, theme, run, metric, drawn.index(run), len(drawn) - 1)
    _draw_distances(below, theme, drawn, metric, of_runs)
    below.set_xlabel("step")
    _draw_legend(figure, theme, drawn)


def _draw_curve(axes: Axes, theme: Theme, run: Run, metric: str, index: int, others: int) -> None:
    """Draw a curve: the first run's as a broad line, the others' as dashes that leave one another room.

    Curves that are equal so show all of their colours.
    """
    curve = run.curves[metric]
    ordered = sorted(curve)
    for step in run.changes:  # as where it lost a machine
        axes.axvline(step, color=_color(theme, index), linewidth=0.9, linestyle=":", zorder=1)
    slots = min(others, _MOST_SLOTS)  # along the line, each for the dashes of one run
    dashes = (_DASH * (index - 1), (_DASH, _DASH * (slots - 1))) if index and slots > 1 else "solid"
    axes.plot(
        ordered,
        [curve[step] for step in ordered],
        color=_color(theme, index),
        linewidth=1.9 if index else 4.5,
        linestyle=dashes,
        dash_capstyle="butt",
        marker="o" if len(ordered) <= _FEW_STEPS else "",
        markersize=max(3.0, 9 - 1.6 * index),
    )


def _draw_legend(figure: Figure, theme: Theme, drawn: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=_color(theme, index), linewidth=3.5) for index in range(len(drawn))]
    labels = [_label(run) for run in drawn]
    figure.legend(lines, labels, loc="outside lower left", ncols=_legend_columns(drawn), handlelength=1.6)


def _draw_distances(axes: Axes, theme: Theme, drawn: Sequence[Run], metric: str, of_runs: Sequence[Run]) -> None:
    base, *others = of_runs
    axes.set_title(
        f"distance from {_label(base, _LONGEST_BASE)}, where it is not 0", fontsize=9, color=theme.muted, pad=6
    )
    distances: list[float] = []
    for run in others:
        away = _distances(run.curves[metric], base.curves[metric])
        index = drawn.index(run)
        dot = max(2.0, min(6.0, 300 / len(away)) - index) if away else 0.0
        axes.plot(list(away), list(away.values()), "o", color=_color(theme, index), markersize=dot, markeredgewidth=0)
        distances += away.values()
    if distances:
        low, high = math.floor(math.log10(min(distances))), math.ceil(math.log10(max(distances)))
        axes.set_yscale("log")
        axes.set_ylim(10.0 ** (low - 0.2), 10.0 ** (max(high, low + 1) + 0.2))  # whole decades, which are labelled
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda distance, _: f"{distance:.0e}")
    else:
        axes.set_yticks([])


def _distances(curve: Curve, base: Curve) -> dict[int, float]:
    """Return the distances by step, without those that are 0 or no finite number, which have no logarithm."""
    away = {step: abs(curve[step] - base[step]) for step in sorted(curve.keys() & base.keys())}
    return {step: distance for step, distance in away.items() if 0 < distance < math.inf}


def _draw_steps(measured: Sequence[tuple[Run, StepTimes]], figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    rows = range(len(measured))
    ends = [0.0 for _ in measured]
    for part in _PARTS:
        widths = [1000 * _seconds(times, part) for _, times in measured]
        shade = theme.colors[_COLORS[part]] if part in _COLORS else theme.rest
        axes.barh(rows, widths, left=ends, height=0.44, color=shade, label=part, linewidth=0.6)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        axes.annotate(
            f"{milliseconds(end / 1000)} ms",
            (end, row),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=theme.ink,
        )
    for row, (run, _) in enumerate(measured):  # above its bar: beside it, a long one would leave no room for bars
        axes.annotate(_label(run), (0, row), (0, 11), textcoords="offset points", va="bottom", color=theme.ink)
    axes.set_yticks([])
    axes.set_ylim(len(measured) - 0.5, -0.9)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.25 * max(ends))
    axes.set_xlabel("milliseconds a step")
    figure.legend(loc="outside upper left", ncols=4, handlelength=0.9, handleheight=0.9, columnspacing=1.0)


def _seconds(times: StepTimes, part: str) -> float:
    return times.saving_seconds_a_step if part == "saving" else times.seconds.get(part, 0.0)
