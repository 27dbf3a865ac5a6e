"""Shared code of the benchmarks: paired timing, a table, and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """Result of one contender against the one it is paired with."""

    name: str
    against: str
    milliseconds: float  # medians of CPU time
    against_milliseconds: float
    ratio: float  # the median of the paired ratios
    target: str  # "≤ 0.1" or "≥ 2.5"; empty for a ratio without a target

    @property
    def reached(self) -> bool | None:
        if not self.target:
            return None
        sign, bound = self.target.split()
        return self.ratio <= float(bound) if sign == "≤" else self.ratio >= float(bound)


@dataclass(frozen=True)
class Options:
    quick: bool
    out: Path


def options(name: str, description: str) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="once and briefly: to see that it runs")
    parser.add_argument("--out", type=Path, default=FOLDER / f"{name}.json", help="the JSON file to write")
    given = parser.parse_args()
    return Options(given.quick, given.out)


def interleaved(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round; every other round is in reverse order, so that drift cancels
    out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in list(contenders)[:: -1 if index % 2 else 1]:
            seconds[name].append(contenders[name]())
    return seconds


def row(name: str, against: str, seconds: dict[str, list[float]], target: str = "", invert: bool = False) -> Row:
    """Return the paired ratio of two contenders; `invert` makes it a speed-up, the time of `against` over that of
    `name`."""
    ratios = [mine / other for mine, other in zip(seconds[name], seconds[against], strict=True)]
    ratio = statistics.median(1 / value if invert else value for value in ratios)
    mine, other = (1000 * statistics.median(seconds[key]) for key in (name, against))
    return Row(name, against, mine, other, ratio, target)


def publish(rows: Iterable[Row], given: Options, per: str) -> None:
    """Print a table and write the JSON file."""
    rows = list(rows)
    cells = [
        [row.name, _ms(row.milliseconds), row.against, _ms(row.against_milliseconds), f"{row.ratio:.3f}"]
        for row in rows
    ]
    cells = [["", f"ms {per}", "against", f"ms {per}", "ratio", "target"]] + [
        [*texts, f"{row.target}{'' if row.reached is not False else '  missed'}"]
        for texts, row in zip(cells, rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    given.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"date": date.today().isoformat(), "quick": given.quick, "machine": _machine(), "per": per}
    content["rows"] = [asdict(row) | {"reached": row.reached} for row in rows]
    given.out.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _machine() -> dict[str, object]:
    packages = ("torch", "lightning", "torchmetrics", "hydra-core")
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # over the last minute, this benchmark included
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
