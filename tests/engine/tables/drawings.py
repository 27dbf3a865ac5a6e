"""Drawings of the documents, as SVG whose text is text: readable on a phone, in the light and in the dark.

python -m tests.engine.tables.drawings          # writes docs/images/{batch,strategies,life}.svg
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

from torch.utils.data import RandomSampler

from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.figures import DARK, LIGHT, Theme
from tests.engine.tables.documents import DOCS

FOLDER = DOCS / "images"
WIDTH, MARGIN = 480, 16  # of the drawing, which a phone of 360 pixels shows at three quarters
FONTS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (FOLDER / f"{name}.svg").write_text(drawing.svg(), encoding="utf-8")


def drawings() -> dict[str, Drawing]:
    """Return each drawing by the name of its file."""
    return {"batch": batch(), "strategies": strategies(), "life": life()}


@dataclass
class Drawing:
    """An SVG picture, drawn from the top down.

    Args:
        title: what it shows, which a screen reader says first.
        description: all that it says, for those who do not see it.
        y: of the next line of text, in pixels.
    """

    title: str
    description: str
    y: float = 12
    elements: list[str] = field(default_factory=list)

    def text(self, text: str, kind: str = "ink", x: float = MARGIN, y: float | None = None, anchor: str = "") -> None:
        """Write a line; without `y`, below what was written so, and 22 pixels high."""
        if y is None:
            self.y += 22
            y = self.y
        placed = f' text-anchor="{anchor}"' if anchor else ""
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{placed}>{escape(text, quote=False)}</text>')

    def box(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        size = f'width="{width:g}" height="{height:g}"'
        self.elements.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size} rx="3"/>')

    def line(self, kind: str, points: Iterable[tuple[float, float]]) -> None:
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.elements.append(f'<polyline class="{kind}" points="{shape}"/>')

    def svg(self) -> str:
        height = self.y + MARGIN
        dark = f"@media (prefers-color-scheme: dark) {{\n{_rules(DARK)}}}\n"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH * 1.25:g}" '
            f'height="{height * 1.25:g}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="desc">{escape(self.description)}</desc>',
            f"<style>\ntext {{ font: 14px {FONTS} }}\n.strong {{ font-weight: 600 }}\n.small {{ font-size: 12px }}\n"
            f"{_rules(LIGHT)}{dark}</style>",
            '<rect class="background" width="100%" height="100%"/>',
        )
        return "\n".join([*head, *self.elements, "</svg>", ""])


def _rules(theme: Theme) -> str:
    """Return the classes of a drawing in a theme's colours: c0, c1, c2 filled, `host` outlined, `lent` pale."""
    fills = {"background": theme.background, "ink": theme.ink, "muted": theme.muted, "empty": theme.grid}
    fills |= {f"c{number}": color for number, color in enumerate(theme.colors[:3])} | {"on": theme.background}
    rules = [f".{name} {{ fill: {color} }}" for name, color in fills.items()]
    for number, color in enumerate(theme.colors[:3]):
        rules.append(f".host{number} {{ fill: none; stroke: {color}; stroke-width: 2; stroke-dasharray: 4 2 }}")
        rules.append(f".lent{number} {{ fill: {color}; opacity: 0.3 }}")
        rules.append(f".line{number} {{ fill: none; stroke: {color}; stroke-width: 2.5 }}")
    rules.append(f".rule {{ fill: none; stroke: {theme.muted}; stroke-dasharray: 2 3 }}")
    return "".join(f"{rule}\n" for rule in rules)


# A global batch, cut as batches/order.py cuts it


SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SEED = 64, 16, 4, 1
SQUARE = 28


def batch() -> Drawing:
    """Draw the samples of the first step over two devices, which accumulate, and over four, which need not."""
    drawing = Drawing(
        "How a global batch is cut over devices and accumulation",
        "The order of an epoch follows from the seed. Its first 16 samples are the global batch of the first step. "
        "With micro_batch_size=4 on 2 devices each device takes two micro batches, one after the other, and adds up "
        "their gradients: the first device samples 1 to 4 and 9 to 12 of the order, the second 5 to 8 and 13 to 16. "
        "On 4 devices each takes one micro batch of the same 16 samples. In both, the gradients are averaged over all "
        "16 samples, and the optimizer takes the same step.",
    )
    drawing.text("global_batch_size=16 micro_batch_size=4", "ink strong")
    drawing.text(f"The epoch's order, from seed={SEED}; its first 16 are step 0:", "muted")
    drawing.y += 8
    order = [sample for micro in range(2) for rank in range(2) for sample in _samples(2, rank, micro)]
    _squares(drawing, order, "empty", MARGIN, drawing.y)
    drawing.y += SQUARE + 8
    _cut(drawing, 2)
    _cut(drawing, 4)
    drawing.y += 6
    drawing.text("The same 16 samples: the same step, the same loss.")
    return drawing


def _samples(devices: int, rank: int, micro: int) -> list[int]:
    plan = BatchPlan.derive(GLOBAL_BATCH, MICRO_BATCH, devices)
    return TrainingSlices(RandomSampler(range(SAMPLES)), SAMPLES, False, plan, rank, SEED, epoch=0, step=0).samples_of(
        0, micro
    )


def _cut(drawing: Drawing, devices: int) -> None:
    accumulation = BatchPlan.derive(GLOBAL_BATCH, MICRO_BATCH, devices).accumulation
    drawing.y += 6
    drawing.text(
        f"trainer.devices={devices}: {MICRO_BATCH} × {devices} devices × accumulation {accumulation}", "ink strong"
    )
    left, wide = MARGIN + 76, MICRO_BATCH * SQUARE + 16
    for micro in range(accumulation):
        drawing.text(f"micro batch {micro}", "muted small", left + micro * wide, drawing.y + 18)
    drawing.y += 24
    for rank in range(devices):
        drawing.text(f"device {rank}", "ink", y=drawing.y + 19)
        for micro in range(accumulation):
            _squares(drawing, _samples(devices, rank, micro), f"c{rank % 2 * 2}", left + micro * wide, drawing.y)
        drawing.y += SQUARE + 4


def _squares(drawing: Drawing, samples: Iterable[int], kind: str, x: float, y: float) -> None:
    for number, sample in enumerate(samples):
        drawing.box(kind, x + number * SQUARE, y, SQUARE - 2, SQUARE - 2)
        ink = "ink" if kind == "empty" else "on"
        drawing.text(str(sample), f"{ink} small", x + number * SQUARE + SQUARE / 2 - 1, y + 18, "middle")


# What each strategy keeps on a device


DEVICES = 4
HELD = {  # by strategies that keep the same: quarters of parameters, gradients, optimizer state, and where they are
    ("single", "ddp"): ("4", "4", "4", "single: on its one device"),
    ("deepspeed_stage_1",): ("4", "4", "1", ""),
    ("deepspeed_stage_1_offload",): ("4", "4", "1 host", ""),
    ("deepspeed_stage_2",): ("4", "1", "1", ""),
    ("deepspeed_stage_2_offload",): ("4", "1 host", "1 host", ""),
    ("fsdp_grad_op",): ("1 lent", "1", "1", "whole from forward to backward"),
    ("fsdp_hybrid",): ("2", "2", "2", "cut within a node of two"),
    ("fsdp", "deepspeed_stage_3"): ("1", "1", "1", "a unit is gathered at a time"),
    ("fsdp_tp",): ("1", "1", "1", "two hold a layer together"),
    ("fsdp_offload", "deepspeed_stage_3_offload"): ("1 host", "1 host", "1 host", ""),
}


def strategies() -> Drawing:
    """Draw the parts of parameters, gradients and optimizer state that the first of four devices keeps."""
    drawing = Drawing(
        "What each strategy keeps on a device",
        "Of four devices on two nodes, the first. "
        + " ".join(f"{', '.join(names)}: {_in_words(*held)}." for names, held in HELD.items()),
    )
    wide = (WIDTH - 2 * MARGIN + 12) / 3
    drawing.text("What the first of four devices keeps, of", "ink strong")
    drawing.y += 6
    for number, kind in enumerate(("parameters", "gradients", "optimizer state")):
        drawing.box(f"c{number}", MARGIN + number * wide, drawing.y + 9, 12, 12)
        drawing.text(kind, "ink", MARGIN + number * wide + 18, drawing.y + 20)
    drawing.y += 30
    for names, (*held, note) in HELD.items():
        drawing.y += 4
        drawing.text(", ".join(names), "ink")
        if note:
            drawing.text(note, "muted small", WIDTH - MARGIN, drawing.y, "end")
        for number, kept in enumerate(held):
            _kept(drawing, kept, number, MARGIN + number * wide, drawing.y + 7, wide - 12)
        drawing.y += 25
    drawing.y += 10
    _legend(drawing)
    return drawing


def _in_words(*held: str) -> str:
    *parts, note = held
    kinds = ("parameters", "gradients", "optimizer state")
    told = [f"{_share(part)} of the {kind}" for part, kind in zip(parts, kinds, strict=True)]
    return ", ".join([*told, *([note] if note else [])])


def _share(part: str) -> str:
    quarters, _, where = part.partition(" ")
    share = {"1": "a quarter", "2": "half", "4": "all"}[quarters]
    return f"{share}, in the host's memory," if where == "host" else share


def _kept(drawing: Drawing, kept: str, color: int, x: float, y: float, width: float) -> None:
    quarters, _, where = kept.partition(" ")
    quarter = width / DEVICES
    for number in range(DEVICES):
        is_kept = number < int(quarters)
        kind = f"host{color}" if is_kept and where == "host" else f"c{color}" if is_kept else "empty"
        kind = f"lent{color}" if not is_kept and where == "lent" else kind
        drawing.box(kind, x + number * quarter + 1, y + 1, quarter - 4, 14)


def _legend(drawing: Drawing) -> None:
    for kind, told in (
        ("c0", "on the device"),
        ("host0", "in the host's memory, between uses"),
        ("lent0", "gathered, while it computes"),
        ("empty", "on other devices"),
    ):
        drawing.box(kind, MARGIN + 1, drawing.y + 9, 26, 14)
        drawing.text(told, "muted", MARGIN + 40)


# A run's life


STEPS = 2000
STARTS = (  # where it begins and ends, the step of its last checkpoint, what was typed, and how it ended
    (0, 780, 780, "strategy=fsdp trainer.devices=8", "preempted at step 780: saves, then ends"),
    (780, 1400, 1250, "strategy=ddp trainer.devices=4", "kill -9 at step 1400: the newest checkpoint is of 1250"),
    (1250, 2000, 2000, "strategy=deepspeed_stage_2 trainer.devices=4", "fit and test have ended at step 2000"),
)
SAVED_EVERY = 250


def life() -> Drawing:
    """Draw three starts of one run over its steps, and its one loss curve below."""
    drawing = Drawing(
        "A run's life: three starts, two kills, one curve",
        "python train.py run_id=mine is started three times, each time under another strategy. "
        + " ".join(
            f"Start {number}, {typed}, goes from step {begin} to {end}: {ended}."
            for number, (begin, end, _, typed, ended) in enumerate(STARTS, 1)
        )
        + " Steps 1250 to 1400 are done a second time, with the same samples. Started again, it does nothing. The loss "
        "curve is that of a run that was never interrupted.",
    )
    drawing.text("python train.py run_id=mine …", "ink strong")
    for number, (begin, end, saved, typed, ended) in enumerate(STARTS):
        drawing.y += 6
        drawing.text(f"… {typed}")
        drawing.y += 8
        drawing.box("empty", _at(0), drawing.y, _at(STEPS) - _at(0), 16)
        drawing.box(f"c{number}", _at(begin), drawing.y, _at(saved) - _at(begin), 16)
        if end > saved:
            drawing.box(f"lent{number}", _at(saved), drawing.y, _at(end) - _at(saved), 16)
        for step in [*range(begin // SAVED_EVERY * SAVED_EVERY + SAVED_EVERY, saved, SAVED_EVERY), saved]:
            drawing.box("ink", _at(step) - 3, drawing.y + 2, 3, 12)
        drawing.y += 14
        drawing.text(ended, "muted small")
    drawing.y += 6
    drawing.text("… once more: does nothing, and says so")
    _curve(drawing)
    return drawing


def _at(step: float) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * step / STEPS


def _curve(drawing: Drawing) -> None:
    """Draw the loss as it falls, in the colour of the start whose step counts."""
    drawing.y += 8
    drawing.text("train/loss: one curve, under all three", "ink strong")
    top = drawing.y + 10
    for number, (begin, *_) in enumerate(STARTS):
        if begin:
            drawing.line("rule", [(_at(begin), top), (_at(begin), top + 84)])
        until = STARTS[number + 1][0] if number + 1 < len(STARTS) else STEPS
        steps = range(begin, until + 1, 10)
        drawing.line(f"line{number}", [(_at(step), top + 80 * (1 - math.exp(-step / 450))) for step in steps])
    drawing.y = top + 84
    for step in (0, 780, 1250, STEPS):
        anchor = "start" if step == 0 else "end" if step == STEPS else "middle"
        drawing.text(f"step {step}" if step == 0 else str(step), "muted small", _at(step), drawing.y + 16, anchor)
    drawing.y += 16
    drawing.box("ink", MARGIN, drawing.y + 12, 3, 12)
    drawing.text(f"a checkpoint: every {SAVED_EVERY} steps, and where it is asked to stop", "muted small", MARGIN + 12)
    drawing.box("lent1", MARGIN, drawing.y + 10, 26, 12)
    drawing.text("done again, with the same samples", "muted small", MARGIN + 36)


if __name__ == "__main__":
    main()
