"""The pool of ranks that other tests run functions on."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailed


def whole(value: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


def failing(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise LookupError("found nothing")
    dist.barrier()


def ending(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        os._exit(7)


def hanging_in_here() -> None:
    time.sleep(3600)


def disturbing() -> None:
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)


def state() -> tuple[object, ...]:
    draws = torch.initial_seed(), float(np.random.rand()), random.random()
    return (
        os.environ.get("LEFT"),
        Path.cwd(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        dist.is_initialized(),
        draws,
    )


def test_a_call_returns_what_each_rank_has_returned(pool: Pool) -> None:
    for ranks, total in ((1, 2.0), (2, 6.0), (4, 20.0)):
        assert [value for _, value in pool(ranks)(whole, 2.0)] == [total] * ranks


def test_an_error_names_its_rank_and_leaves_the_others_usable(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1: (.|\n)*LookupError: found nothing") as failed:
        pool(2)(failing, 1)
    assert isinstance(failed.value.error, LookupError)
    assert pool(2)(whole, 1.0)[0][1] == 3.0


def test_a_rank_that_ends_is_replaced(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1: its process has ended with 7"):
        pool(2)(ending, 1)
    assert pool(2)(whole, 1.0)[0][1] == 3.0


def test_a_call_that_hangs_is_ended_with_its_stacks(pool: Pool) -> None:
    pool(2)(whole, 1.0)  # so that ranks have imported this file
    with pytest.raises(RankFailed, match="in hanging_in_here"):
        pool(2, timeout_seconds=3)(hanging_in_here)


def test_a_call_leaves_the_process_as_it_was(pool: Pool) -> None:
    before = pool(1)(state)
    pool(1)(disturbing)
    assert pool(1)(state) == before
