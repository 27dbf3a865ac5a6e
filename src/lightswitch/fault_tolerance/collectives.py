"""Collectives that this process has entered, as torch's flight recorder numbers them."""

from __future__ import annotations

import contextlib


def entered() -> dict[str, int]:
    """Return how many collectives this process has entered in each of its process groups, by the group's name.

    NCCL is asynchronous: a rank enters a collective and goes on, until something needs its result. So a rank that the
    others wait for has entered fewer than they, wherever they stand. Reading the numbers waits for no device.
    """
    from torch.distributed.distributed_c10d import _world  # here: a start that is refused imports no torch

    found: dict[str, int] = {}
    for group in list(_world.pg_map):
        with contextlib.suppress(RuntimeError):  # a back-end that does not count
            backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
            counts = [one._get_sequence_number_for_group() for one in backends.values()]  # type: ignore[attr-defined]  # torch's stub lacks it
            found[group.group_name] = sum(counts)
    return found
