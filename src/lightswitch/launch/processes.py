"""The processes of a run and the group they form."""

from __future__ import annotations

import atexit
import os
import sys

from lightswitch.launch import placement


def leave_group_at_exit() -> None:
    """Lightning ends NCCL groups only; the threads of gloo, left running, can abort a finished process as it exits."""
    atexit.register(_leave_group)


def take_back(environ: dict[str, str]) -> None:
    """End what a finished job made of this process, so that the next job of a sweep finds it as the first one did.

    A launcher's processes stay one group: where they meet was said once, for all jobs.

    Args:
        environ: the environment before the job. Strategies export their rank, world size and port.
    """
    if not placement.detect(environ).is_external:
        _leave_group()
    os.environ.clear()
    os.environ.update(environ)


def _leave_group() -> None:
    for name in ("deepspeed.comm", "torch.distributed"):  # DeepSpeed keeps groups of its own beside the world's
        comm = sys.modules.get(name)
        if comm is not None and comm.is_available() and comm.is_initialized():
            comm.destroy_process_group()
