"""The picture of the README: the loss curves of one run under six strategies, and how far they are apart.

python -m tests.engine.tables.curves FOLDER     # trains what FOLDER lacks, and draws docs/images/curves.svg
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping
from math import log10
from pathlib import Path

from tests.engine.conftest import CHECKOUT

PICTURE = CHECKOUT / "docs" / "images" / "curves.svg"
STRATEGIES = {  # by the colour that its curve has
    "single": "#9aa5b1",
    "ddp": "#4c72b0",
    "fsdp": "#dd8452",
    "fsdp_grad_op": "#55a868",
    "deepspeed_stage_2": "#c44e52",
    "deepspeed_stage_3": "#8172b3",
}
STEPS, WIDTH, HEIGHT, LEFT, TOP = 100, 640, 345, 60, 20
LOSS, APART = (2.2, 6.0, 190), (-9.0, -5.0, 90)  # lowest and highest value, height in pixels; of the second, log10


def main(folder: Path) -> None:
    curves = {strategy: _curve(strategy, folder) for strategy in STRATEGIES}
    PICTURE.write_text(_drawn(curves))


def _curve(strategy: str, folder: Path) -> list[float]:
    """Return the loss of each step; a run that has ended is not trained again."""
    words = [f"strategy={strategy}", "run_id=" + strategy, f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1"]
    words += ["trainer.limit_test_batches=0", *(["trainer.devices=2"] if strategy != "single" else [])]
    subprocess.run([sys.executable, CHECKOUT / "train.py", *words], cwd=folder, check=True)
    with (folder / "runs" / "gpt" / strategy / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def _drawn(curves: Mapping[str, list[float]]) -> str:
    apart = {
        name: [log10(max(abs(one - other), 1e-9)) for one, other in zip(curve, curves["single"], strict=True)]
        for name, curve in curves.items()
        if name != "single"
    }
    below = TOP + LOSS[2] + 30
    lines = [_line(curve, STRATEGIES[name], TOP, LOSS, 12 - 2 * n) for n, (name, curve) in enumerate(curves.items())]
    lines += [_line(values, STRATEGIES[name], below, APART, 1) for name, values in apart.items()]
    names = [
        f'<text x="{WIDTH - 10}" y="{TOP + 20 + 18 * n}" text-anchor="end" fill="{colour}">{name}</text>'
        for n, (name, colour) in enumerate((name, STRATEGIES[name]) for name in curves)
    ]
    marks = [_mark(value, f"{value:g}", TOP, LOSS) for value in (3.0, 4.0, 5.0)]
    marks += [_mark(value, text, below, APART) for value, text in ((-9.0, "0"), (-7.0, "1e-7"), (-5.0, "1e-5"))]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-labelledby="title desc" font-family="sans-serif" font-size="13">',
            '<title id="title">One loss curve under each strategy</title>',
            f'<desc id="desc">The training loss of {STEPS} steps of the small GPT under {len(curves)} strategies: the '
            "curves lie on one another. Below, how far each is from that of one process: less than 1e-5.</desc>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *(*marks, *lines, *names),
            f'<text x="{LEFT}" y="{TOP - 5}" fill="#444">train/loss</text>',
            f'<text x="{LEFT}" y="{below - 5}" fill="#444">difference from one process</text>',
            "</svg>\n",
        )
    )


def _line(values: list[float], colour: str, top: int, scale: tuple[float, float, int], width: int) -> str:
    step = (WIDTH - LEFT - 10) / (STEPS - 1)
    points = " ".join(f"{LEFT + n * step:.1f},{_y(value, top, scale):.1f}" for n, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _mark(value: float, text: str, top: int, scale: tuple[float, float, int]) -> str:
    y = _y(value, top, scale)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{text}</text>'
    )


def _y(value: float, top: int, scale: tuple[float, float, int]) -> float:
    lowest, highest, height = scale
    return top + height * (highest - min(value, highest)) / (highest - lowest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
