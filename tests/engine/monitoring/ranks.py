"""Several ranks of one job, forked from the test so that torch is imported once."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable

import torch


def run_ranks(world_size: int, work: Callable[[], object]) -> None:
    """Runs `work` in `world_size` processes with torchrun's environment; fails where one of them does."""
    port = _free_port()
    children = [_fork(rank, world_size, port, work) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * world_size


def _fork(rank: int, world_size: int, port: int, work: Callable[[], object]) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "test",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # past pytest, which belongs to the parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
