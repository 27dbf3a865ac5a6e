"""The processes of a run and the group they form."""

from __future__ import annotations

import atexit

import torch.distributed as dist


def leave_group_at_exit() -> None:
    """Lightning ends NCCL groups only; the threads of gloo, left running, can abort a finished process as it exits."""
    atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
