"""How a run scales: what a sweep's dry runs tell of time, memory and communication as the world grows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightswitch import figures, regular_files
from lightswitch.monitoring.display import aligned, compact
from lightswitch.planning import report, scaling_picture
from lightswitch.planning.scaling_picture import Line, Point

FILE = "dry_run.json"
_HEADER = (
    *("scaling", "ranks", "global batch", "micro batch", "GiB", "fits", "s a step", "bound by"),
    *("GB a device", "samples/s", "efficiency"),
)
_TEXTS = (0, 7)  # of its columns


def of_sweep(folder: Path) -> Iterator[str]:
    """Yield what to print of a sweep's dry runs, and write it beside them: scaling.json, and a picture."""
    lines = read(folder.glob(f"*/{FILE}"))
    if not lines:
        return
    for strategy in dict.fromkeys(line.strategy for line in lines):
        yield f"{strategy}\n{table([line for line in lines if line.strategy == strategy])}\n"
    path = folder / "scaling.json"
    regular_files.write_text(path, json.dumps([asdict(line) for line in lines], indent=1))
    yield f"scaling    {os.path.relpath(path)}"
    if (missing := figures.missing()) is not None:
        yield missing
        return
    light, _ = scaling_picture.picture(lines).save(folder / "scaling.svg")
    yield f"picture    {os.path.relpath(light)}"


def read(files: Iterable[Path]) -> list[Line]:
    """Return the lines of dry runs: for each strategy, one of the batch as it is, and one of a batch that grows."""
    found: dict[tuple[str, str], list[Point]] = {}
    for file in files:
        told = json.loads(file.read_text())
        for kind, estimate in told["scaling"].items():
            found.setdefault((told["strategy"], kind), []).append(_point(estimate))
    lines = [Line(*key, tuple(sorted(points, key=lambda one: one.ranks))) for key, points in found.items()]
    return sorted(lines, key=lambda line: (line.strategy, line.kind))


def _point(estimate: dict[str, Any]) -> Point:
    nodes, per_node = estimate["nodes"], estimate["devices_per_node"]
    return Point(
        ranks=nodes * per_node,
        global_batch=estimate["global_batch"],
        micro_batch=estimate["micro_batch"],
        accumulation=estimate["accumulation"],
        bytes=estimate["bytes"],
        usable_bytes=estimate["usable_bytes"],
        seconds=max(estimate["least_seconds"].values(), default=None),
        bound=estimate["bound_by"],
        received_bytes=estimate["bytes_within_node"] + estimate["bytes_between_nodes"] / per_node,
    )


def table(lines: Sequence[Line]) -> str:
    """Return a row for each world of each line; efficiency is samples a second of a device, by those in its first."""
    unit = report.unit_of(max((point.bytes for line in lines for point in line.points), default=0))
    header = tuple(unit if name == "GiB" else name for name in _HEADER)
    return "\n".join(aligned([header, *(row for line in lines for row in _rows(line, unit))], _TEXTS))


def _rows(line: Line, unit: str) -> Iterator[tuple[str, ...]]:
    for point, efficiency in zip(line.points, line.efficiencies(), strict=True):
        rate = point.samples_per_second
        yield (
            line.kind,
            str(point.ranks),
            str(point.global_batch),
            f"{point.micro_batch} × {point.accumulation}",
            report.number(point.bytes, unit),
            "yes" if point.bytes <= point.usable_bytes else "no",
            "-" if point.seconds is None else report.digits(point.seconds),
            point.bound or "-",
            report.digits(point.received_bytes / 1e9),
            "-" if rate is None else compact(rate),
            "-" if efficiency is None else f"{efficiency:.0%}",
        )
