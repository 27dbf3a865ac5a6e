"""One rank of a world, simulated where it is alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only

from lightswitch.errors import RefusedRequest
from lightswitch.planning.dry_run import Rank, rehearse, span
from lightswitch.planning.fakes import World
from lightswitch.planning.simulation import Work
from lightswitch.process import call_each_forked
from lightswitch.strategies.fsdp import FSDP
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

    (found,) = call_each_forked([rehearsed])
    return found


def test_a_rank_of_a_thousand_knows_its_groups() -> None:
    rank, own = _alone(partial(FSDP, "HYBRID_SHARD"), World(128, 8, rank=517))
    replicate, shard = rank.axes
    assert (replicate.size, replicate.position, replicate.ranks[:2]) == (128, 64, (5, 13))  # device 5 of each node
    assert (shard.size, shard.position, shard.ranks) == (8, 5, tuple(range(512, 520)))  # node 64
    assert rank.data_rank == 517
    assert own == 0  # this process is rank 0 of its own, as before


def test_a_process_that_ends_is_told() -> None:
    with pytest.raises(RefusedRequest, match="has ended, with exit code 3"):
        call_each_forked([lambda: os._exit(3)])


@pytest.mark.parametrize(
    ("ranks", "told"),
    [((4,), "4"), ((0, 4), "0, 4"), (range(8), "0 to 7"), (range(5, 1024, 8), "5, 13, 21 … 1021")],
)
def test_ranks_are_told_in_few_words(ranks: range, told: str) -> None:
    assert span(tuple(ranks)) == told
