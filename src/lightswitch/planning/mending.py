"""What would have to change for a run that no strategy fits: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightswitch.planning.device import Device
from lightswitch.planning.estimate import STATES, Estimate


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
    larger = f"devices of {gib_needed(min(one.memory.bytes for one in tried), device):.3g} GiB"
    return f"use at least {min(found)} devices, or {larger}" if found else f"use {larger}, or shorter samples"


def devices_needed(found: Estimate) -> int | None:
    """Return the least number of devices over which a sharded run fits; None where no number helps.

    States are divided by their number; what else a device holds stays.
    """
    memory = found.memory
    states = sum(memory.peak.by_kind.get(kind, 0) for kind in STATES)
    room = memory.usable_bytes - (memory.bytes - states)
    return math.ceil(states * found.run.world_size / room) if room > 0 else None


def gib_needed(bytes: float, device: Device) -> float:
    """Return the GiB that a device of this kind would have to have."""
    return bytes / device.with_memory(1).usable_bytes(1)
