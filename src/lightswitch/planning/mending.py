"""Advice for a run that fits under no strategy, or that has run out of memory. Arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightswitch.batches.plan import BatchPlan
from lightswitch.planning import report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import GIB, Device
from lightswitch.planning.estimate import STATES, Estimate
from lightswitch.planning.fake_group import World

_FULL = 0.9  # of a device: beside states that take so much, no step has room


def of(tried: Sequence[Estimate], sharding: Sequence[Estimate], device: Device) -> str:
    """Return the smallest change that helps: a smaller micro batch, more devices, or larger ones.

    Args:
        tried: what does not fit.
        sharding: those of them that shard all states over all devices.
    """
    samples = max(found.largest_micro_batch or 0 for found in tried)
    if samples:
        return f"use micro_batch_size={samples} or less"
    found = [count for one in sharding if (count := devices_needed(one)) is not None]
    larger = f"devices of {report.amount(bytes_needed(min(one.memory.bytes for one in tried), device))}"
    return f"use at least {min(found)} devices, or {larger}" if found else f"use {larger}, or shorter samples"


def devices_needed(found: Estimate) -> int | None:
    """Return the least number of devices over which a sharded run fits; None where no number helps.

    States are divided by their number; what else a device holds stays.
    """
    memory = found.memory
    states = sum(memory.peak.by_kind.get(kind, 0) for kind in STATES)
    room = memory.usable_bytes - (memory.bytes - states)
    return math.ceil(states * found.run.world_size / room) if room > 0 else None


def next_words(
    states: float, usable: float, batch: BatchPlan, at: Candidate, others: Sequence[Candidate], world: World
) -> tuple[str, ...]:
    """Return what to type next for a run that ran out of memory; nothing where only more or larger devices help.

    Where the device has room beside the states, it is activations that are too many: half of the samples, or
    activation checkpointing. Where it has none, or that is done, the next strategy that keeps less of the states.

    Args:
        states: bytes of all parameters, gradients and optimizer state.
        usable: bytes of a device.
        at: the strategy under which it ran.
        others: those to turn to, in this order.
    """
    kept = at.kept_share(world.nodes, world.devices_per_node)
    if kept * states < _FULL * usable:
        share = batch.micro_batch * batch.accumulation
        smaller = [size for size in range(1, batch.micro_batch // 2 + 1) if share % size == 0]
        if smaller:
            return (f"micro_batch_size={smaller[-1]}",)
        if (recomputing := at.recomputing()) is not None:
            return recomputing.words[1:]
    for other in others:
        if (less := other.kept_share(world.nodes, world.devices_per_node)) < kept and less * states < _FULL * usable:
            return other.words
    return ()


def bytes_needed(bytes: float, device: Device) -> float:
    """Return the bytes of memory that a device of this kind needs, so that this many of them are usable."""
    return GIB * bytes / device.with_memory(1).usable_bytes(1)
