"""Time-outs of process groups."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Backend, ProcessGroup
from torch.distributed.distributed_c10d import _get_default_timeout, _set_pg_timeout, _world


def set_timeouts(timeout: timedelta | None) -> None:
    """Give a time-out to each process group that has its back-end's default.

    Device meshes and DeepSpeed make groups without naming one. NCCL's default is 10 minutes, after which it ends the
    ranks that wait, and not the one they wait for.

    Args:
        timeout: None to leave them as they are.
    """
    if timeout is None:
        return
    for group, (backend, _) in list(_world.pg_map.items()):
        if any(found == _get_default_timeout(Backend(backend)) for found in timeouts(group)):
            _set_pg_timeout(timeout, group)


def timeouts(group: ProcessGroup) -> list[timedelta]:
    """Return the time-outs of a process group's back-ends, one for each kind of device."""
    backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    return [backend.options._timeout for backend in backends.values() if getattr(backend, "options", None)]
