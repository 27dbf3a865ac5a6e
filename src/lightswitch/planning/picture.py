"""The picture of a plan: what each strategy holds on a device, against what the device can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightswitch import figures
from lightswitch.planning import report
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import Estimate, Memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered units",
    "communication": "communication",
}
_NEAR = 4  # times the widest bar: then the device's memory is drawn, too
_LEAST_SHARE = 1e-3  # of the widest bar: what is thinner can't be seen


def memory(estimates: Sequence[Estimate], device: Device) -> figures.Picture:
    """Return a bar for each estimate, by kinds of memory, in the order given from the top."""
    widest = max(one.memory.bytes for one in estimates)
    unit = report.unit_of(widest)
    unit_bytes = report.UNITS[unit]

    def draw(figure: Figure, theme: figures.Theme) -> None:
        axes = figure.subplots()
        names = [_label(one) for one in estimates]
        bars = [_parts(one.memory) for one in estimates]
        left = [0.0] * len(bars)
        for index, label in enumerate([*_LABELS.values(), "temporary", "runtime"]):
            widths = [bar[label] / unit_bytes for bar in bars]
            if max(bar[label] for bar in bars) > _LEAST_SHARE * widest:
                color = theme.rest if label == "runtime" else theme.colors[index % len(theme.colors)]
                axes.barh(names, widths, left=left, color=color, label=label, height=0.62)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        if estimates[0].memory.usable_bytes < _NEAR * widest:
            usable = estimates[0].memory.usable_bytes / unit_bytes
            axes.axvline(usable, color=theme.ink, linewidth=1.2)
            axes.annotate(f" {device.name}", (usable, -0.55), color=theme.ink, va="center", annotation_clip=False)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{unit} on each device, at the peak of a step")
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.tick_params(axis="y", labelcolor=theme.ink)
        figure.legend(loc="outside lower left", ncols=4)

    told = (
        f"{report.name(one)}, micro batch {one.run.micro_batch}: {report.amount(one.memory.bytes)}" for one in estimates
    )
    description = f"Memory of each device, at the peak of a step. {'; '.join(told)}. {_limit(estimates, device)}"
    return figures.picture(
        draw, 8, 1.5 + 0.5 * len(estimates), f"Memory of each strategy on {device.name}", description
    )


def _label(one: Estimate) -> str:
    precision = report.precision(one)
    return f"{report.strategy(one)}\n{precision + ', ' if precision else ''}{one.run.micro_batch} a micro batch"


def _limit(estimates: Sequence[Estimate], device: Device) -> str:
    return f"{device.name} has {report.amount(estimates[0].memory.usable_bytes)} to give."


def _parts(memory: Memory) -> dict[str, float]:
    """Return bytes by label; what has none of its own is temporary."""
    kinds = memory.peak.by_kind
    shown = {label: kinds.get(kind, 0.0) for kind, label in _LABELS.items()}  # type: ignore[call-overload]  # a kind
    return {**shown, "temporary": memory.peak.bytes - sum(shown.values()), "runtime": memory.runtime_bytes}
