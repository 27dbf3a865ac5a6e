"""Compare runs: print one table of them, and write it with the curves as one HTML page, without scripts or network."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from lightswitch import regular_files
from lightswitch.compare.quantities import Section, apart, metrics, sections
from lightswitch.compare.run import Run, find, read
from lightswitch.errors import Refused, printable, shown
from lightswitch.monitoring.display import aligned, compact

NAME = "compare.html"
_OURS, _TITLE_WITHIN = "runs compared", 1000  # end of a comparison's title, and where it begins at the latest
_MOST_CURVES = 6  # metrics that are drawn
_MOST_COLUMNS = 6  # runs that stand beside one another in the terminal; more stand below one another
_COLORS = 7  # of page.html; they repeat if there are more runs
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 480, 240, 48, 222, 8  # of a picture, and of its axes, in pixels


def write(paths: Sequence[Path], file: Path | None = None) -> Iterator[str]:
    """Compare runs, write the page, and yield the text to print.

    Args:
        paths: directories of runs or sweeps.
        file: path of the page; if None, compare.html in the deepest folder that contains all the runs.

    Raises:
        Refused: there are fewer than two runs, or the file is no page of a comparison.
        OSError: a file can't be written.
    """
    run_dirs, others = find(paths)
    runs = read(run_dirs)
    file = file or Path(os.path.commonpath([run_dir.resolve().parent for run_dir in run_dirs])) / NAME
    is_other = file.is_file() and not file.is_symlink() and file.stat().st_size > 0
    if is_other and _OURS not in file.read_text(errors="replace")[:_TITLE_WITHIN]:
        raise Refused(f"{file} exists already, and is of no comparison; name another file with -o FILE.html")
    named, lines = sections(runs), [*_lines(runs)]
    yield printable("\n".join([*terminal(runs, named), "", *lines]).rstrip() + "\n")
    yield from (f"left out   {shown(path)}: it is no run" for path in others)
    regular_files.write_text(file, page(runs, named, lines))
    yield f"page       {shown(file.resolve())}"


def terminal(runs: Sequence[Run], named: Sequence[Section]) -> list[str]:
    """Return the lines of one table: a column for each run or, of many runs, a row for each with values and speeds."""
    labels = [run.label for run in runs]
    if len(runs) <= _MOST_COLUMNS:
        blank = ("", *("" for _ in runs))
        rows = [row for one in named for row in (blank, *((name, *cells) for name, cells in one.rows.items()))]
        return aligned([("", *labels), *rows[1:]], [0])
    columns = {name: cells for one in named[:2] for name, cells in one.rows.items()}
    return aligned([("run", *columns), *zip(labels, *columns.values(), strict=True)], [0])


def _lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what ended runs, and how far the training losses of runs of one experiment are apart."""
    yield from (f"{run.state:<10} {run.label}: {run.failure}" for run in runs if run.failure is not None)
    if (found := apart(runs)) is not None:
        yield found


def page(runs: Sequence[Run], named: Sequence[Section], lines: Sequence[str]) -> str:
    """Return the HTML of a comparison: the sections, with the curves below the first one."""
    names = list(dict.fromkeys(run.name for run in runs if run.name is not None))
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    for index, section in enumerate(named):
        heads = "".join(f"<th>{escape(text)}</th>" for text in ("", *(run.label for run in runs)))
        rows = ("".join(f"<td>{escape(text)}</td>" for text in (name, *row)) for name, row in section.rows.items())
        table = f"<table>\n<tr>{heads}</tr>\n" + "".join(f"<tr>{row}</tr>\n" for row in rows) + "</table>"
        parts.append(f'<h2>{escape(section.title)}</h2>\n<div class="scroll">{table}</div>')
        parts += [f'<p class="notes">{escape(section.note)}</p>'] if section.note else []
        parts += [_curves(runs)] if index == 0 else []
    title = escape(f"{', '.join(names) or 'no name'}: {len(runs)} {_OURS}")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return Template(template).substitute(title=title, body="\n".join(parts))


# Curves


def _curves(runs: Sequence[Run]) -> str:
    """Return a picture of each of the first metrics with several values, and a legend of the runs."""
    several = [name for name in metrics(runs) if any(len(run.curves.get(name, {})) > 1 for run in runs)]
    drawn = [run for run in runs if run.curves]
    pictures = "\n".join(f"<figure>{curve(drawn, metric)}</figure>" for metric in several[:_MOST_CURVES])
    keys = (
        f'<span><i class="key" style="background: var(--c{index % _COLORS})"></i>{escape(run.label)}</span>'
        for index, run in enumerate(drawn)
    )
    return f'<div class="curves">{pictures}</div>\n<p class="legend">{" ".join(keys)}</p>' if pictures else ""


def curve(runs: Sequence[Run], metric: str) -> str:
    """Draw a metric of runs by step as SVG."""
    curves = [
        {step: value for step, value in run.curves.get(metric, {}).items() if math.isfinite(value)} for run in runs
    ]
    values = [value for one in curves for value in one.values()] or [0.0]
    low, high, last = min(values), max(values), max((step for one in curves for step in one), default=0)

    def x(step: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 8) * step / (last or 1), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / ((high - low) or 1), 1)

    parts = []
    for value in (low, (low + high) / 2, high):
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>')
    for step in (0, last):
        parts.append(f'<text x="{x(step)}" y="{_HEIGHT - 2}" text-anchor="middle">{compact(step)}</text>')
    for index, one in enumerate(curves):
        color, width = f"var(--c{index % _COLORS})", max(1.5, 4.5 - index)  # equal curves show all of their colors
        points = " ".join(f"{x(step)},{y(one[step])}" for step in sorted(one))
        parts.append(f'<polyline points="{points}" style="stroke: {color}; stroke-width: {width}"/>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(metric)}">{"".join(parts)}</svg>'
    return f"<figcaption>{escape(metric)}</figcaption>{svg}"
