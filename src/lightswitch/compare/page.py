"""Compare runs: print tables, and write them with pictures as one HTML page, without scripts or network."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightswitch import figures, regular_files
from lightswitch.compare import tables
from lightswitch.compare.run import Run, find, read
from lightswitch.compare.tables import Table
from lightswitch.errors import Refused, printable, shown
from lightswitch.figures import DARK, LIGHT, Picture, Theme

if TYPE_CHECKING:
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
_MOST_CURVES = 6  # metrics that are drawn
_FEW_STEPS = 8  # curves with at most so many steps get markers
_LETTERS, _LONGEST = 54, 48  # characters in the picture's width, and in a label


def write(paths: Sequence[Path], file: Path | None = None, tags: Sequence[str] = ()) -> Iterator[str]:
    """Compare runs, write the page, and yield the text to print.

    Args:
        paths: directories of runs or sweeps.
        file: path of the page; if None, compare.html in the deepest folder that contains all the runs.
        tags: compare only runs that have all of these tags.

    Raises:
        Refused: there are fewer than two runs with the tags, or the file is no page of a comparison.
        OSError: a file can't be written.
    """
    run_dirs, others = find(paths)
    runs = [one for one in read(run_dirs) if one.tags.issuperset(tags)]
    if len(runs) < 2:
        raise Refused(
            f"found {len(runs)} runs with the tags {', '.join(tags)}, expected two or more; type "
            f"tags=[{','.join(tags)}] when you start a run"
        )
    file = file or Path(os.path.commonpath([run_dir.resolve().parent for run_dir in run_dirs])) / NAME
    _refuse_to_replace(file)
    names = list(dict.fromkeys(run.name for run in runs if run.name is not None))
    title = f"{', '.join(names) or 'no name'}: {len(runs)} {_OURS}"
    found, summary = tables.tables(runs), tables.summary(runs)
    yield tables.terminal(found, summary)
    yield from (f"left out   {shown(path)}: it is no run" for path in others)
    if (lacking := figures.missing()) is not None:
        yield lacking
    regular_files.write_text(file, page(title, found, summary, [] if lacking else draw_curves(runs)))
    yield f"page       {shown(file.resolve())}"


def _refuse_to_replace(path: Path) -> None:
    """Refuse to write over a file that is not of an earlier comparison."""
    is_other = path.is_file() and not path.is_symlink() and path.stat().st_size > 0
    if is_other and _OURS not in path.read_text(errors="replace")[:_TITLE_WITHIN]:
        raise Refused(f"{path} exists already, and is of no comparison; name another file with -o FILE.html")


def of_sweep(folder: Path) -> Iterator[str]:
    """Compare the jobs of a sweep with `write`; if they can't be compared, yield the reason in one line."""
    try:
        yield from write([folder])
    except (Refused, OSError) as error:
        yield f"compare    {error}"


def page(title: str, tables: Sequence[Table], summary: Sequence[str], curves: Sequence[Picture]) -> str:
    """Return the HTML of a comparison, with pictures of the curves below the first table."""
    parts = [f"<h1>{escape(title)}</h1>", *_paragraphs(summary, "summary")]
    for index, table in enumerate(tables):
        parts += [f"<section>\n<h2>{escape(table.title)}</h2>", *_table(table), *_paragraphs(table.notes, "notes")]
        parts += [_inline(curves)] if curves and index == 0 else []
        parts.append("</section>")
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


def _inline(pictures: Sequence[Picture]) -> str:
    shown = (
        f'<div class="picture"><div class="light">{one.light}</div><div class="dark">{one.dark}</div></div>'
        for one in pictures
    )
    return f'<div class="pictures">{"".join(shown)}</div>'


def _table(table: Table) -> Iterator[str]:
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


def draw_curves(runs: Sequence[Run]) -> list[Picture]:
    """Draw metrics of all runs, a picture each: the objective, the training loss, then others with several values."""
    several = [name for name in tables.metrics(runs) if any(len(run.curves.get(name, {})) > 1 for run in runs)]
    first = [name for name in (*tables.objectives(runs), "train/loss") if name in several]
    drawn = [run for run in runs if run.curves]
    height_inches = 2.6 + 0.2 * math.ceil(len(drawn) / _legend_columns(drawn)) if drawn else 0.0
    return [
        figures.picture(partial(_draw_curves, drawn, metric), _WIDTH_INCHES, height_inches)
        for metric in list(dict.fromkeys([*first, *several]))[:_MOST_CURVES]
    ]


def _color(theme: Theme, index: int) -> str:
    """Return the color of a run; the theme's colors repeat if there are more runs."""
    return theme.colors[index % len(theme.colors)]


def _label(run: Run) -> str:
    return _plain(run.label if len(run.label) <= _LONGEST else f"{run.label[: _LONGEST - 1]}…")


def _plain(text: str) -> str:
    """Return a text as one line with escaped dollar signs, which matplotlib would read as formulas."""
    return " ".join(printable(text).split()).replace("$", r"\$")


def _legend_columns(runs: Sequence[Run]) -> int:
    longest = max(len(_label(run)) for run in runs)
    return max(1, min(len(runs), _LETTERS // (longest + 6)))


def _draw_curves(drawn: Sequence[Run], metric: str, figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    axes.set_title(_plain(metric))
    axes.set_xlabel("step")
    for index, run in enumerate(drawn):
        color, curve = _color(theme, index), run.curves.get(metric, {})
        for step in run.changes:  # it went on with other devices: for example, it lost a machine
            axes.axvline(step, color=color, linewidth=0.9, linestyle=":", zorder=1)
        axes.plot(
            sorted(curve),
            [curve[step] for step in sorted(curve)],
            color=color,
            linewidth=max(1.5, 4.5 - index),  # equal curves lie on one another, and show all of their colors
            marker="o" if len(curve) <= _FEW_STEPS else "",
            markersize=max(3.0, 9 - 1.6 * index),
        )
    _draw_legend(figure, theme, drawn)


def _draw_legend(figure: Figure, theme: Theme, drawn: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=_color(theme, index), linewidth=3.5) for index in range(len(drawn))]
    labels = [_label(run) for run in drawn]
    figure.legend(lines, labels, loc="outside lower left", ncols=_legend_columns(drawn), handlelength=1.6)
