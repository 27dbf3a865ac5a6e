"""Format a plan as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from lightswitch.monitoring.display import aligned, clock, compact
from lightswitch.planning.device import GIB, Device
from lightswitch.planning.estimate import Estimate, Kind

UNITS = {"GiB": GIB, "MiB": GIB // 1024}  # units of memory, in bytes
SENT_UNITS = {"GB": 1e9, "MB": 1e6}
_SHOWN: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations")


def ordered(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return estimates sorted from the most to the least recommended.

    Estimates that fit come first, sorted by the lower bound of the step time, rounded to two digits and to tenths of a
    millisecond, which Python alone needs for a step; ties keep the given order, the simplest strategy first. Those
    with 16-bit weights follow all others that fit. Estimates that do not fit come last, sorted by memory.
    """
    return sorted(
        estimates, key=lambda one: (not one.memory.fits, one.memory.fits and one.run.rounds_weights, _rank(one))
    )


def _rank(one: Estimate) -> float:
    return float(f"{round(one.least_seconds or 0.0, 4):.2g}") if one.memory.fits else one.memory.bytes


def table(estimates: Iterable[Estimate]) -> str:
    """Return a table with one row per estimate, in the given order; memory is in GiB, or in MiB if all are small."""
    estimates = list(estimates)
    unit = unit_of(max((one.memory.bytes for one in estimates), default=0))
    sent_unit = "GB" if max(map(_sent_bytes, estimates), default=0) >= 1e8 else "MB"
    header = (
        *("strategy", "micro batch", unit, "fits", "parameters", "gradients", "optimizer", "activations", "other"),
        *("most samples", "s a step", "bound by", f"{sent_unit} sent", "host"),
    )
    rows = [header, *(_row(one, unit, sent_unit) for one in estimates)]
    if not any(one.memory.host_bytes for one in estimates):
        rows = [row[:-1] for row in rows]
    return "\n".join(aligned(rows, [0, header.index("bound by")]))


def _row(one: Estimate, unit: str, sent_unit: str) -> tuple[str, ...]:
    kinds = one.memory.peak.by_kind
    shown = [kinds.get(kind, 0.0) for kind in _SHOWN]
    seconds, host = one.least_seconds, one.memory.host_bytes
    return (
        name(one),
        str(one.run.micro_batch) + (f" × {one.run.accumulation}" if one.run.accumulation > 1 else ""),
        number(one.memory.bytes, unit),
        "yes" if one.memory.fits else "no",
        *(number(bytes, unit) for bytes in (*shown, one.memory.bytes - sum(shown))),
        "?" if one.largest_micro_batch is None else str(one.largest_micro_batch),
        "-" if seconds is None else digits(seconds),
        one.bound or "-",
        digits(_sent_bytes(one) / SENT_UNITS[sent_unit]),
        number(host, unit) if host else "",
    )


def _sent_bytes(one: Estimate) -> float:
    return one.traffic.of_a_device(one.run.world.devices_per_node)


def name(one: Estimate) -> str:
    """Return the strategy's name, with a suffix if it uses activation checkpointing."""
    recomputes = any("activation_checkpointing" in word for word in one.words)
    return one.words[0].partition("=")[2] + (", recomputing" if recomputes else "")


def answer(best: Estimate, device: Device) -> str:
    """Return one line that recommends the best estimate, or says that nothing fits and how much memory is needed."""
    if not best.memory.fits:
        return f"no strategy fits; the smallest is {took(best, device)}"
    rates = []
    if (rate := best.samples_per_second) is not None:
        rates.append(f"at most {compact(rate)} samples/s")
        if best.run.tokens_per_sample:
            rates.append(f"{compact(rate * best.run.tokens_per_sample)} tokens/s")
    if (hours := best.hours) is not None:
        rates.append(f"the run at least {clock(3600 * hours)}, {compact(hours * best.run.world.size)} device-hours")
    return ", ".join([took(best, device), *rates])


def details(best: Estimate) -> Iterator[tuple[str, str]]:
    """Yield (label, text) pairs with details of the best estimate; plan.json has the details of all estimates."""
    peak, sent, world = best.memory.peak, best.traffic, best.run.world
    yield "peak", f"{peak.phase}, at {peak.place}" if peak.place else peak.phase
    if line := replaced(best):
        yield "replaced", line
    between = f" and {magnitude(sent.between / world.devices_per_node)} between nodes" if world.nodes > 1 else ""
    arithmetic = magnitude(best.flops, "FLOP")
    yield "step", f"{arithmetic}, {magnitude(sent.within)} sent within the node{between}, per device"
    yield "save", f"{amount(best.checkpoint_bytes)} in a checkpoint, over all ranks"


def replaced(one: Estimate) -> str:
    """Return a line about the tensor values that were replaced; empty if there are none."""
    if not (count := sum(one.replaced.values())):
        return ""
    values = "1 value" if count == 1 else f"{count} values"
    first = next(iter(one.replaced))
    return f"{values} that a micro batch reads from tensors, the first at {first}: numbers are approximate"


def took(one: Estimate, device: Device) -> str:
    """Return one line with a strategy's memory use on the device, and whether values were replaced.

    The host's memory is mentioned if it is too small.
    """
    memory = one.memory
    of = f"{share(memory.bytes, memory.usable_bytes)} on {device.name}"
    if not memory.fits_host:
        of += f", {share(memory.host_bytes, memory.usable_host_bytes)} on the host"
    about = ", with replaced values" if one.replaced else ""
    return f"{name(one)}, micro batch {one.run.micro_batch}: {of}{about}"


def share(bytes: float, whole_bytes: float) -> str:
    """Format bytes out of a total: 61.2 of 78.8 GiB, 3.5 MiB of 78.8 GiB."""
    one, whole = amount(bytes), amount(whole_bytes)
    unit = whole.rpartition(" ")[2]
    return f"{one.removesuffix(unit).strip()} of {whole}"


def amount(bytes: float) -> str:
    """Format bytes with a unit: 61.2 GiB, 3.5 MiB."""
    unit = unit_of(bytes)
    return f"{number(bytes, unit)} {unit}"


def unit_of(most_bytes: float) -> str:
    """Return the unit in which to print bytes of memory."""
    return "GiB" if most_bytes >= GIB / 10 else "MiB"


def number(bytes: float, unit: str = "GiB") -> str:
    """Format bytes in a given unit, without the unit: 0.003, 1.25, 61.2, 120."""
    return digits(bytes / UNITS[unit])


def digits(number: float) -> str:
    """Format a number with three digits and no exponent: 0.003, 61.2, 1200; <0.001 for smaller numbers."""
    if 0 < number < 0.001:
        return "<0.001"
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def magnitude(number: float, unit: str = "B") -> str:
    """Format a number and its unit with a decimal prefix: 30 TFLOP, 1.97 MB."""
    text = compact(number)
    shown = text.rstrip("kMGT")
    return f"{shown} {text[len(shown) :]}{unit}"


def as_data(one: Estimate) -> dict[str, Any]:
    """Return one estimate as plain data, in bytes, seconds and operations."""
    derived = {"fits": one.memory.fits, "bytes": one.memory.bytes, "tensor_bytes": one.memory.peak.bytes}
    return {**asdict(one), **asdict(one.run), **derived, "bound_by": one.bound}
