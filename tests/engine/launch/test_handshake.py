"""Processes that see different checkpoints end with a line, and do not wait for one another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightswitch.errors import LostRank
from lightswitch.launch.handshake import Handshake
from tests.pool import Pool


def _agree(rank_0: Path | None, rank_1: Path | None) -> str:
    """Return what each process is told of its start, which rank 0 and rank 1 have found."""
    dist.init_process_group("gloo")
    own: Any = SimpleNamespace(ckpt_path=(rank_0, rank_1)[dist.get_rank()], global_rank=dist.get_rank())
    unused: Any = None
    handshake = Handshake(own, SimpleNamespace(broadcast=_broadcast), 1, *[unused] * 5)  # type: ignore[arg-type]  # of a strategy
    try:
        handshake._agree_on_start()
    except LostRank as lost:
        return str(lost)
    finally:
        dist.destroy_process_group()
    return ""


def _broadcast(value: object) -> object:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "told"),
    [
        (None, None, ""),
        (Path("step_5.ckpt"), Path("step_5.ckpt"), ""),
        (Path("step_5.ckpt"), Path("step_4.ckpt"), ""),  # read by rank 0's choice
        (Path("step_5.ckpt"), None, "rank 1 starts at step 0, but rank 0 resumes from step_5.ckpt: the file system "),
        (None, Path("step_5.ckpt"), "rank 1 resumes from step_5.ckpt, but rank 0 starts at step 0: the file system "),
    ],
)
def test_a_process_that_sees_no_checkpoint_or_alone_sees_one_tells_so(
    rank_0: Path | None, rank_1: Path | None, told: str, pool: Pool
) -> None:
    of_0, of_1 = pool(2)(_agree, rank_0, rank_1)
    assert of_0 == ""
    assert of_1.startswith(told)
    assert bool(of_1) == bool(told)
