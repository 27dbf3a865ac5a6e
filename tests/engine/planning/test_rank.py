"""One rank of a world, simulated where it is alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.tensor import Replicate, Shard

from lightswitch.errors import RefusedRequest
from lightswitch.planning.dry_run import span
from lightswitch.planning.fakes import World
from lightswitch.planning.files import Layout, files, stored_bytes
from lightswitch.planning.rank import Rank, rehearse
from lightswitch.planning.simulation import Work
from lightswitch.process import forked
from lightswitch.strategies.fsdp import FSDP
from lightswitch.strategies.fsdp1 import FSDP1
from tests.engine.models.language import LanguageModel

WORK = Work(
    lambda: LanguageModel(partial(torch.optim.AdamW, lr=1e-3)),
    lambda count: 2 * (torch.zeros(count, 32, dtype=torch.long),),
    is_cut=False,
    samples=2,
    accumulation=1,
    options={"gradient_clip_val": 1.0},
)


def _alone(make: Callable[[], Strategy], world: World) -> tuple[Rank, int]:
    def rehearsed() -> tuple[Rank, int]:
        return rehearse(WORK, make(), world)[0], rank_zero_only.rank  # type: ignore[attr-defined]  # a function's

    (found,) = forked.call_each([rehearsed])
    return found


def test_a_rank_of_a_thousand_knows_its_groups() -> None:
    rank, own = _alone(partial(FSDP, "HYBRID_SHARD"), World(128, 8, rank=517))
    replicate, shard, _ = rank.axes
    assert (replicate.size, replicate.position, replicate.ranks[:2]) == (128, 64, (5, 13))  # device 5 of each node
    assert (shard.size, shard.position, shard.ranks) == (8, 5, tuple(range(512, 520)))  # node 64
    assert rank.data_rank == 517
    assert own == 0  # this process is rank 0 of its own, as before


def test_units_of_flat_parameters_are_found() -> None:
    rank, _ = _alone(FSDP1, World(1, 2, rank=1))
    block = 4 * 32 * 32 + 8 * 32 * 32 + 2 * 32  # attention, the MLP, two norms
    assert [(unit.kind, unit.parameters) for unit in rank.units][1:] == 2 * [("Block", block)]
    assert all(unit.rank_bytes == unit.bytes / 2 for unit in rank.units)


def test_files_hold_each_part_once() -> None:
    """7 rows over 3 devices of each of 2 replicas: 3, 3 and 1; what all hold goes to one of 6."""
    tensors = {
        "whole": Layout((5,), torch.float32),
        "rows": Layout((7, 2), torch.float32, (("replicate", Replicate()), ("shard", Shard(0)))),
        "few": Layout((2,), torch.float32, (("replicate", Replicate()), ("shard", Shard(0)))),
    }
    found = files(tensors, {"replicate": 2, "shard": 3})
    whole, rows = stored_bytes((5,), torch.float32), [stored_bytes((n, 2), torch.float32) for n in (3, 3, 1)]
    one, none = stored_bytes((1,), torch.float32), stored_bytes((0,), torch.float32)
    # of two replicas the first has the larger tensor, so the second writes the smaller
    assert found.bytes == (rows[0] + whole, rows[1], rows[2], one, one, none)
    assert (found.tensors, found.chunks) == (3, 1 + 3 + 3)


def test_the_first_rank_writes_buffers() -> None:
    weight, buffer = Layout((5,), torch.float32), Layout((5,), torch.float32, is_of_first=True)
    one = stored_bytes((5,), torch.float32)
    assert files({"a": weight, "b": buffer}, {"replicate": 2}).bytes == (2 * one, 0)
    assert files({"a": weight, "b": weight}, {"replicate": 2}).bytes == (one, one)


def test_a_process_that_ends_is_told() -> None:
    with pytest.raises(RefusedRequest, match="has ended, with exit code 3"):
        forked.call_each([lambda: os._exit(3)])


@pytest.mark.parametrize(
    ("ranks", "told"),
    [((4,), "4"), ((0, 4), "0, 4"), (range(8), "0 to 7"), (range(5, 1024, 8), "5, 13, 21 … 1021")],
)
def test_ranks_are_told_in_few_words(ranks: range, told: str) -> None:
    assert span(tuple(ranks)) == told
