"""Scaling of a run: time, memory and communication by world size, from the dry runs of a sweep."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightswitch import figures, regular_files
from lightswitch.config.overrides import key_and_value
from lightswitch.monitoring.display import aligned, compact
from lightswitch.planning import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "dry_run.json"
_HEADER = (
    *("ranks", "global batch", "micro batch", "GiB", "fits", "s a step", "bound by"),
    *("GB a device", "samples/s", "efficiency"),
)
_TEXTS = (6,)  # columns of text
_ALONG = ("trainer.devices", "trainer.num_nodes", "precision", "strategy")  # told by a row, or by a line's strategy
_LEAST_SECONDS = 0.1  # shorter steps are shown in milliseconds
_NEAR = 4  # draw the device's memory limit if it is below this multiple of the largest value


def of_sweep(folder: Path, overrides: Callable[[Path], Iterable[str]]) -> Iterator[str]:
    """Yield the text to print about a sweep's dry runs, and write scaling.json and a picture to its folder.

    Args:
        overrides: returns the overrides of the job in a directory.
    """
    lines = read({file: overrides(file.parent) for file in folder.glob(f"*/{FILE}")})
    if not lines:
        return
    for line in lines:
        yield f"{line.strategy}\n{table(line)}\n"
    path = folder / "scaling.json"
    regular_files.write_text(path, json.dumps([asdict(line) for line in lines], indent=1))
    yield f"scaling    {os.path.relpath(path)}"
    if (missing := figures.missing()) is not None:
        yield missing
        return
    light, _ = picture(lines).save(folder / "scaling.svg")
    yield f"picture    {os.path.relpath(light)}"


def read(overrides: Mapping[Path, Iterable[str]]) -> list[Line]:
    """Read the files of dry runs and return one line per strategy and, for example, model, if jobs differ in that.

    Args:
        overrides: by file.
    """
    found: dict[str, list[Point]] = {}
    given = {file: {one for one in of if key_and_value(one)[0] not in _ALONG} for file, of in overrides.items()}
    shared = set.intersection(*given.values()) if given else set()
    for file, own in given.items():
        plan = json.loads(file.read_text())
        name = " ".join([plan["strategy"], *sorted(own - shared)])
        found.setdefault(name, []).append(_point(plan["estimate"]))
    return [Line(name, tuple(sorted(found[name], key=lambda one: one.ranks))) for name in sorted(found)]


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


def table(line: Line) -> str:
    """Return a table with one row per world size.

    Efficiency is samples per second and device, relative to the smallest world.
    """
    unit = report.unit_of(max(point.bytes for point in line.points))
    header = tuple(unit if name == "GiB" else name for name in _HEADER)
    return "\n".join(aligned([header, *_rows(line, unit)], _TEXTS))


def _rows(line: Line, unit: str) -> Iterator[tuple[str, ...]]:
    for point, efficiency in zip(line.points, line.efficiencies(), strict=True):
        rate = point.samples_per_second
        yield (
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


@dataclass(frozen=True)
class Point:
    """Step time and bytes of a device at one world size.

    Attributes:
        bytes: peak memory of the device.
        usable_bytes: memory that a process can use on the device.
        seconds: lower bound of the step time; None if unknown.
        bound: resource that sets this bound.
        received_bytes: bytes received from other devices in a step.
    """

    ranks: int
    global_batch: int
    micro_batch: int
    accumulation: int
    bytes: float
    usable_bytes: float
    seconds: float | None
    bound: str | None
    received_bytes: float

    @property
    def samples_per_second(self) -> float | None:
        """Return the upper bound of samples per second, over all devices; None if unknown."""
        return self.global_batch / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Line:
    """One strategy, and what else jobs differ in, at increasing world sizes."""

    strategy: str
    points: tuple[Point, ...]

    def efficiencies(self) -> list[float | None]:
        """Return samples per second and device, relative to the first world; None if no time is known."""
        rates = [point.samples_per_second for point in self.points]
        shares = [rate / point.ranks if rate else None for rate, point in zip(rates, self.points, strict=True)]
        return [share / shares[0] if share and shares[0] else None for share in shares]


def picture(lines: Sequence[Line]) -> figures.Picture:
    """Draw up to three panels over the number of devices: step time, memory, received bytes. Empty ones are omitted."""
    description = " ".join(f"{line.strategy}: {_told(line)}." for line in lines)
    title = "Seconds a step, memory and received bytes of a device over the number of devices"
    return figures.picture(partial(_draw, lines), 10, 3.9, title, description)


def _told(line: Line) -> str:
    return "; ".join(
        f"{point.ranks} devices{'' if point.seconds is None else f', at least {_duration(point.seconds)}'}, "
        f"{report.amount(point.bytes)}, {report.size(point.received_bytes)} received"
        for point in line.points
    )


def _duration(seconds: float) -> str:
    return f"{report.digits(1e3 * seconds)} ms" if seconds < _LEAST_SECONDS else f"{report.digits(seconds)} s"


def _draw(lines: Sequence[Line], figure: Figure, theme: figures.Theme) -> None:
    points = [point for line in lines for point in line.points]
    in_ms = max(point.seconds or 0.0 for point in points) < _LEAST_SECONDS
    memory = report.unit_of(max(point.bytes for point in points))
    sent = report.sent_unit_of(max(point.received_bytes for point in points))
    of_memory = f"{memory} on a device"
    panels: dict[str, Callable[[Point], float | None]] = {
        f"{'milliseconds' if in_ms else 'seconds'} a step, at least": (
            lambda point: point.seconds and point.seconds * (1e3 if in_ms else 1)
        ),
        of_memory: lambda point: point.bytes / report.UNITS[memory],
        f"{sent} that a device receives in a step": lambda point: point.received_bytes / report.SENT_UNITS[sent],
    }
    shown = {title: of for title, of in panels.items() if any(map(of, points))}
    for axes, (title, of) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        axes.set_title(title)
        _draw_lines(axes, theme, lines, of)
        if title == of_memory:
            axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
            _draw_limit(axes, theme, points, report.UNITS[memory])
        elif all(map(of, points)):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4)


def _draw_lines(axes: Axes, theme: figures.Theme, lines: Sequence[Line], of: Callable[[Point], float | None]) -> None:
    for number, line in enumerate(lines):
        ranks = [point.ranks for point in line.points]
        axes.plot(
            ranks,
            [math.nan if (value := of(point)) is None else value for point in line.points],
            color=theme.colors[number % len(theme.colors)],
            marker="o",
            markersize=4.5,
            label=line.strategy,
        )
    worlds = sorted({point.ranks for line in lines for point in line.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_xlabel("devices")


def _draw_limit(axes: Axes, theme: figures.Theme, points: Sequence[Point], unit_bytes: int) -> None:
    usable = max(point.usable_bytes for point in points)
    if usable < _NEAR * max(point.bytes for point in points):
        axes.axhline(usable / unit_bytes, color=theme.ink, linewidth=1.2)
        axes.annotate("a device's memory", (0.02, usable / unit_bytes), xycoords=("axes fraction", "data"), va="bottom")
