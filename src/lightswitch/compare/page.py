"""Write a comparison as Markdown and as one self-contained HTML page with pictures, without scripts or network."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightswitch import figures, regular_files
from lightswitch.compare import tables
from lightswitch.compare.comparison import Comparison
from lightswitch.compare.run import Curve, Run, find, read
from lightswitch.compare.tables import Table, milliseconds
from lightswitch.errors import Refused, printable, shown
from lightswitch.figures import DARK, LIGHT, Picture, Theme
from lightswitch.monitoring.step_times import PHASES, StepTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NAME = "compare.html"
_OURS, _TITLE_WITHIN = "runs compared", 1000  # end of a comparison's title, and where it begins at the latest
_LONG = 32  # characters of a table cell; longer ones may break
_STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 40px 28px 64px; max-width: 1080px; background: var(--background); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; line-height: 1.25; font-weight: 650; margin: 0 0 12px; }
h2 { font-size: 17px; font-weight: 650; margin: 44px 0 12px; }
p { margin: 4px 0; }
.summary { font-size: 16px; }
.notes { color: var(--muted); font-size: 13px; margin-top: 12px; max-width: 80ch; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 62%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-size: 12.5px; font-weight: 500; }
th, td { padding: 7px 0 7px 20px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { padding-left: 0; }
td:first-child { font-weight: 550; }
.r { text-align: right; }
.wide td { vertical-align: top; }
.wide td:not(:first-child) { white-space: normal; overflow-wrap: break-word; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 20px 28px;
  margin: 8px 0 20px; }
.picture { max-width: 560px; }
.picture svg { display: block; width: 100%; height: auto; }
@media (max-width: 480px) { body { padding: 20px 12px 40px; } }
.picture .dark { display: none; }
@media (prefers-color-scheme: dark) { .picture .light { display: none; } .picture .dark { display: block; } }
"""


_WIDTH_INCHES = 4.5  # 432 pixels: two fit side by side on a page, and one stays readable on a phone
_FEW_STEPS = 8  # curves with at most so many steps get markers
_LETTERS, _LONGEST = 54, 48  # characters in the picture's width, and in a label
_LONGEST_BASE = 26  # characters of the baseline run's label in a title
_MOST_SLOTS, _DASH = 3, 2.5  # dash length in line widths
_PARTS = (*PHASES[:-1], "saving", PHASES[-1])
_COLORS = {"data": 4, "forward": 0, "backward": 2, "communication": 5, "optimizer": 1, "saving": 3}


def write(paths: list[Path], file: Path | None = None, tags: Sequence[str] = ()) -> Iterator[str]:
    """Compare runs, write the HTML page and a Markdown file beside it, and yield the text to print.

    Args:
        paths: directories of runs or sweeps.
        file: path of the page; if None, compare.html in the deepest folder that contains all the runs.
        tags: compare only runs that have all of these tags.

    Raises:
        Refused: a path is not a run, no run has the tags, or the runs can't be compared.
        OSError: a file can't be written.
    """
    run_dirs = find(paths)
    runs = [one for one in read(run_dirs) if one.tags.issuperset(tags)]
    if tags and not runs:
        raise Refused(
            f"found no run with the tags {', '.join(tags)}; type tags=[{','.join(tags)}] when you start a run"
        )
    comparison = Comparison(tuple(runs))
    file = file or _common_folder(run_dirs) / NAME
    beside = file.with_suffix(".md")
    _refuse_to_replace(file, beside)
    title = f"{comparison.name}: {len(comparison.runs)} {_OURS}"
    message, summary = tables.tables(comparison), tables.summary(comparison)
    yield tables.terminal(message, summary)
    if (lacking := figures.missing()) is not None:
        yield lacking
    drawn = {
        "Curves": lacking or draw_curves(comparison),
        "Time per step, in ms": [] if lacking else draw_steps(comparison),
    }
    regular_files.write_text(file, page(title, message, summary, drawn))
    regular_files.write_text(beside, tables.markdown(title, message, summary))
    yield f"page       {shown(file.resolve())}"
    yield f"markdown   {shown(beside.resolve())}"


def _refuse_to_replace(*files: Path) -> None:
    """Refuse to write over a file that is not of an earlier comparison, such as README.md beside README.html."""
    for path in files:
        is_other = path.is_file() and not path.is_symlink() and path.stat().st_size > 0
        if is_other and _OURS not in path.read_text(errors="replace")[:_TITLE_WITHIN]:
            raise Refused(f"{path} exists already, and is of no comparison; name another file with -o FILE.html")


def of_sweep(folder: Path) -> Iterator[str]:
    """Compare the jobs of a sweep with `write`; if they can't be compared, yield the reason in one line."""
    try:
        yield from write([folder])
    except (Refused, OSError) as error:
        yield f"compare    {error}"


def _common_folder(run_dirs: list[Path]) -> Path:
    return Path(os.path.commonpath([run_dir.resolve().parent for run_dir in run_dirs]))


def page(
    title: str, tables: Sequence[Table], summary: Sequence[str], pictures: Mapping[str, list[Picture] | str]
) -> str:
    """Return the HTML of a comparison.

    Args:
        pictures: pictures by the title of the table below them, or a text that says why there are none.
    """
    parts = [f"<h1>{escape(title)}</h1>", *_paragraphs(summary, "summary")]
    for table in tables:
        parts.append(f"<section>\n<h2>{escape(table.title)}</h2>")
        if drawn := pictures.get(table.title):
            parts += _paragraphs([drawn], "notes") if isinstance(drawn, str) else [_inline(drawn)]
        parts += [*_table(table), *_paragraphs(table.notes, "notes"), "</section>"]
    return _document(title, "\n".join(parts))


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_variables(LIGHT)}\n"
        f"@media (prefers-color-scheme: dark) {{ {_variables(DARK)} }}{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _variables(theme: Theme) -> str:
    colors = {"background": theme.background, "ink": theme.ink, "muted": theme.muted, "grid": theme.grid}
    return f":root {{ {' '.join(f'--{name}: {color};' for name, color in colors.items())} }}"


def _paragraphs(lines: Sequence[str], kind: str) -> Iterator[str]:
    if lines:
        yield f'<div class="{kind}">' + "".join(f"<p>{escape(line)}</p>" for line in lines) + "</div>"


def _inline(pictures: list[Picture]) -> str:
    shown = (
        f'<div class="picture"><div class="light">{one.light}</div><div class="dark">{one.dark}</div></div>'
        for one in pictures
    )
    return f'<div class="pictures">{"".join(shown)}</div>'


def _table(table: Table) -> Iterator[str]:
    if not table.rows:
        return
    kind = ' class="wide"' if "r" not in table.alignment else ""
    yield f'<div class="scroll"><table{kind}>\n<thead><tr>{_cells("th", table.columns, table.alignment)}</tr></thead>'
    yield "<tbody>"
    yield from (f"<tr>{_cells('td', row, table.alignment)}</tr>" for row in table.rows)
    yield "</tbody></table></div>"


def _cells(tag: str, cells: Sequence[str], alignment: str) -> str:
    sides = (' class="r"' if side == "r" else "" for side in alignment)
    return "".join(f"<{tag}{side}>{_breakable(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))


def _breakable(text: str) -> str:
    """Escape a text as HTML; a long text gets optional line breaks after dots in names and slashes in paths."""
    if len(text) <= _LONG:
        return escape(text)
    return re.sub(r"(?<=[A-Za-z_])([./])(?=[A-Za-z_])", r"\1<wbr>", escape(text))


def draw_curves(comparison: Comparison) -> list[Picture]:
    """Draw the first two common metrics, usually the training loss and the objective, in one picture each.

    A picture shows the curves of all runs and, below, their distances from the first run. Returns an empty list if no
    two runs have a metric in common.
    """
    drawn = [run for run in comparison.runs if run.curves]
    height_inches = 4.2 + 0.2 * math.ceil(len(drawn) / _legend_columns(drawn)) if drawn else 0.0
    return [
        figures.picture(partial(_draw_curves, comparison, drawn, metric), _WIDTH_INCHES, height_inches)
        for metric in comparison.metrics[:2]
    ]


def draw_steps(comparison: Comparison) -> list[Picture]:
    """Draw a bar, split into phases, for each run whose steps were measured; return no picture if there is none."""
    measured = [(run, run.times) for run in comparison.runs if run.times is not None and run.times.measured_steps]
    if not measured:
        return []
    return [figures.picture(partial(_draw_steps, measured), _WIDTH_INCHES, 1.5 + 0.5 * len(measured))]


def _color(theme: Theme, index: int) -> str:
    """Return the color of a run; the theme's colors repeat if there are more runs."""
    return theme.colors[index % len(theme.colors)]


def _label(run: Run, longest: int = _LONGEST) -> str:
    """Return a run's label, truncated to ``longest`` characters."""
    return _plain(run.label if len(run.label) <= longest else f"{run.label[: longest - 1]}…")


def _plain(text: str) -> str:
    """Return a text as one line with escaped dollar signs, which matplotlib would read as formulas."""
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
    """Draw a curve: the first run's as a broad line, the others' as interleaved dashes.

    So equal curves show all of their colors.
    """
    curve = run.curves[metric]
    ordered = sorted(curve)
    for step in run.changes:  # for example, the run lost a machine
        axes.axvline(step, color=_color(theme, index), linewidth=0.9, linestyle=":", zorder=1)
    slots = min(others, _MOST_SLOTS)  # dash positions along the line, one per run
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
    axes.set_title(f"nonzero distance from {_label(base, _LONGEST_BASE)}", fontsize=9, color=theme.muted, pad=6)
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
        axes.set_ylim(10.0 ** (low - 0.2), 10.0 ** (max(high, low + 1) + 0.2))  # whole decades, which have tick labels
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda distance, _: f"{distance:.0e}")
    else:
        axes.set_yticks([])


def _distances(curve: Curve, base: Curve) -> dict[int, float]:
    """Return the distances by step, without zeros and non-finite values, which a logarithmic axis can't show."""
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
    for row, (run, _) in enumerate(measured):  # above the bar: a long label beside it would leave no room for bars
        axes.annotate(_label(run), (0, row), (0, 11), textcoords="offset points", va="bottom", color=theme.ink)
    axes.set_yticks([])
    axes.set_ylim(len(measured) - 0.5, -0.9)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.25 * max(ends))
    axes.set_xlabel("milliseconds per step")
    figure.legend(loc="outside upper left", ncols=4, handlelength=0.9, handleheight=0.9, columnspacing=1.0)


def _seconds(times: StepTimes, part: str) -> float:
    return times.saving_seconds_a_step if part == "saving" else times.seconds.get(part, 0.0)
