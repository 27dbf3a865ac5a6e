"""What a rank has entered is counted as torch's flight recorder does, whether or not that runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lightswitch.failures.stacks import collectives_entered


@contextmanager
def _group_of_one(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _recorded(dump: Callable[[], bytes]) -> int:
    """The number of the last collective that was entered in the newest group."""
    groups = pickle.loads(dump())["pg_status"]
    return groups[max(groups, key=int)]["last_enqueued_collective"]


def test_collectives_are_counted_in_each_group() -> None:
    with _group_of_one("gloo"):
        other = dist.new_group([0])
        before = collectives_entered()
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.all_reduce(torch.ones(1))
        dist.barrier(group=other)
        after = collectives_entered()
    first, second = before
    assert (after[first] - before[first], after[second] - before[second]) == (2, 1)
    assert collectives_entered() == {}


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="this torch records NCCL's collectives alone")
def test_the_count_is_the_flight_recorders() -> None:
    with _group_of_one("gloo"):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        (count,) = collectives_entered().values()
        assert count == _recorded(c10d._dump_fr_trace) > 2


@pytest.mark.gpu
def test_the_count_is_the_flight_recorders_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # by default, some torch records nothing
        monkeypatch.setenv(name, "100")
    torch.cuda.set_device(0)
    with _group_of_one("nccl"):
        for _ in range(3):
            dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
        (count,) = collectives_entered().values()
        assert count == _recorded(c10d._dump_nccl_trace) > 2
