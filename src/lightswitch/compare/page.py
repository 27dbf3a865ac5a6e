"""The files of a comparison: Markdown, and one HTML page that holds its pictures, without scripts or network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from lightswitch import figures, regular_files
from lightswitch.compare import pictures, run, tables
from lightswitch.compare.comparison import Comparison
from lightswitch.compare.tables import Table
from lightswitch.errors import Refused, shown
from lightswitch.figures import DARK, LIGHT, Picture, Theme

NAME = "compare.html"
_LONG = 32  # letters of a table's cell
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


def write(paths: list[Path], file: Path | None = None, tags: Sequence[str] = ()) -> Iterator[str]:
    """Compare runs, write the page and the same as Markdown beside it, and yield what to print.

    Args:
        paths: run directories, or those of sweeps.
        tags: what a run must be marked with to be compared.
        file: the page's; if None, compare.html in the deepest folder that holds all the runs.

    Raises:
        Refused: a path is no run, or the runs can't be compared.
        OSError: a file can't be written.
    """
    run_dirs = run.find(paths)
    runs = [one for one in run.read(run_dirs) if one.tags.issuperset(tags)]
    if tags and not runs:
        raise Refused(f"found no run with the tags {', '.join(tags)}; a run is marked by tags=[{','.join(tags)}]")
    comparison = Comparison(tuple(runs))
    file = file or _common_folder(run_dirs) / NAME
    title = f"{comparison.name}: {len(comparison.runs)} runs beside one another"
    told, summary = tables.tables(comparison), tables.summary(comparison)
    yield tables.terminal(told, summary)
    if (lacking := figures.missing()) is not None:
        yield lacking
    drawn = {
        "Curves": lacking or pictures.curves(comparison),
        "A step, in ms": [] if lacking else pictures.steps(comparison),
    }
    regular_files.write_text(file, page(title, told, summary, drawn))
    beside = file.with_suffix(".md")
    regular_files.write_text(beside, tables.markdown(title, told, summary))
    yield f"page       {shown(file.resolve())}"
    yield f"markdown   {shown(beside.resolve())}"


def of_sweep(folder: Path) -> Iterator[str]:
    """Compare the jobs of a sweep as `write` does; what can't be compared is told in a line."""
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
        pictures: by the title of the table that they stand above; a text says why there are none.
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
    """Return a text that, if it is long, may break behind the dots of names and the slashes of paths."""
    if len(text) <= _LONG:
        return escape(text)
    return re.sub(r"(?<=[A-Za-z_])([./])(?=[A-Za-z_])", r"\1<wbr>", escape(text))
