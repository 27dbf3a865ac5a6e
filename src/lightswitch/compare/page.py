"""A comparison as one HTML file: pictures inside, no script, nothing from a network, in light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from lightswitch.compare.tables import Table
from lightswitch.figures import DARK, LIGHT, Picture, Theme

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
