"""The files of a comparison, and what a terminal shows of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightswitch import figures, regular_files
from lightswitch.compare import page, pictures, run, tables, text
from lightswitch.compare.comparison import Comparison
from lightswitch.errors import Refused, shown

NAME = "compare.html"


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
    yield text.terminal(told, summary)
    if (lacking := figures.missing()) is not None:
        yield lacking
    drawn = {
        "Curves": lacking or pictures.curves(comparison),
        "A step, in ms": [] if lacking else pictures.steps(comparison),
    }
    regular_files.write_text(file, page.page(title, told, summary, drawn))
    beside = file.with_suffix(".md")
    regular_files.write_text(beside, text.markdown(title, told, summary))
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
