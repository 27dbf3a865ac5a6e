"""What follows from one simulation of a rank is what another one finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightswitch.planning.dry_run import Rank, rehearse, span
from lightswitch.planning.estimate import Step
from lightswitch.planning.fakes import World
from lightswitch.planning.simulation import Work, simulate
from lightswitch.planning.tracking import Tracking
from lightswitch.planning.values import Repeats
from lightswitch.process import call_each_forked
from lightswitch.strategies.ddp import DDP, Single
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


@pytest.mark.nightly
def test_a_rank_of_a_thousand_knows_its_groups() -> None:
    rank, own = _alone(partial(FSDP, "HYBRID_SHARD"), World(128, 8, rank=517))
    replicate, shard = rank.axes
    assert (replicate.size, replicate.position, replicate.ranks[:2]) == (128, 64, (5, 13))  # device 5 of each node
    assert (shard.size, shard.position, shard.ranks) == (8, 5, tuple(range(512, 520)))  # node 64
    assert rank.data_rank == 517
    assert own == 0  # this process is rank 0 of its own, as before


@pytest.mark.parametrize(
    ("ranks", "told"), [((4,), "4"), ((0, 4), "0, 4"), (range(8), "0 to 7"), (range(5, 1024, 8), "5, 13, 21 … 1021")]
)
def test_ranks_are_told_in_few_words(ranks: range, told: str) -> None:
    assert span(tuple(ranks)) == told


# What is looked up is what the fake mode itself returns: shapes, strides, and whose storage it is

aten = torch.ops.aten
CALLS: dict[str, Callable[[Tensor], tuple[Any, tuple[Any, ...]]]] = {
    "a new tensor": lambda x: (aten.mm.default, (x, x)),
    "a view": lambda x: (aten.t.default, (x,)),
    "a view of a part": lambda x: (aten.slice.Tensor, (x, 0, 1, 3)),
    "a view by strides of its own": lambda x: (aten.as_strided.default, (x, [2, 2], [1, 4], 1)),
    "several new ones": lambda x: (aten.var_mean.correction, (x, [0])),
    "an argument itself": lambda x: (aten.add_.Tensor, (x, 1)),
    "nothing": lambda x: (aten._foreach_mul_.Scalar, ([x, x], 2.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_comes_again_is_what_the_mode_returns(name: str) -> None:
    with FakeTensorMode() as fake:
        repeats = Repeats(fake)
        for _ in range(3):
            x = torch.empty(4, 4)
            func, args = CALLS[name](x)
            expected, found = func(*args), repeats.call(func, args, {})
            assert _told(found, x) == _told(expected, x)


def _told(out: Any, x: Tensor) -> list[Any]:
    """What can be told of tensors without values."""
    return [
        (
            *(type(out), type(one), one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one is x),
            *(one.untyped_storage()._cdata == x.untyped_storage()._cdata, one.untyped_storage().nbytes()),
        )
        for one in tree_leaves(out)
        if isinstance(one, Tensor)
    ]


def test_other_arguments_are_another_call() -> None:
    with FakeTensorMode() as fake:
        repeats, x = Repeats(fake), torch.empty(4, dtype=torch.int64)
        dtypes = [repeats.call(aten.mul.Tensor, (x, factor), {}).dtype for factor in (1, 1.0, True, 1)]
        assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_a_new_tensor_has_a_storage_of_its_own_each_time() -> None:
    with FakeTensorMode() as fake:
        repeats, x = Repeats(fake), torch.empty(4, 4)
        made = [repeats.call(aten.mm.default, (x, x), {}) for _ in range(3)]
        assert len({one.untyped_storage()._cdata for one in made}) == 3


# What follows from one simulation is what another one finds


def _step(strategy: Strategy, world: World, samples: int, accumulation: int = 1) -> Step:
    return simulate(replace(WORK, is_cut=True, samples=samples, accumulation=accumulation), strategy, world)


@pytest.mark.parametrize(("strategy", "world"), [(Single, World(1, 1)), (FSDP, World(2, 8))])
@pytest.mark.nightly
def test_any_micro_batch_follows_from_two(strategy: Callable[[], Strategy], world: World) -> None:
    found, expected = (_step(strategy(), world, samples).growth for samples in (2, 11))
    assert found.at(11).peak().bytes == pytest.approx(expected.at(11).peak().bytes, rel=0.001)
    assert found.peak_bytes(11) == pytest.approx(expected.at(11).peak().bytes, rel=0.001)


class InChunks(LanguageModel):
    """Its path goes by the size of the micro batch, as that of a loss in chunks."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([super(InChunks, self).forward(rows) for rows in ids.split(2)])


@pytest.mark.nightly
def test_of_a_module_that_goes_by_its_size_other_micro_batches_are_estimated() -> None:
    """Not exactly, as the peak may move; what is proposed is simulated at its own size."""
    work = replace(WORK, is_cut=True, model=lambda: InChunks(partial(torch.optim.AdamW, lr=1e-3)))
    found, expected = (simulate(replace(work, samples=samples), Single(), World(1, 1)).growth for samples in (4, 16))
    assert found.is_known
    assert found.peak_bytes(16) == pytest.approx(expected.at(16).peak().bytes, rel=0.1)


class Gan(LightningModule):
    """Two parts, each with a forward pass after the other's step; the second takes the most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleList([nn.Linear(64, 8), nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for part, optimizer in zip(self.parts, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(part(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adamax(part.parameters(), foreach=False) for part in self.parts]


def _step_of_gan(samples: int) -> Step:
    work = Work(Gan, lambda count: torch.ones(count, 64), True, samples, 1, {})
    return simulate(work, FSDP(cpu_offload=True), World(1, 2))


def test_a_forward_pass_after_an_optimizers_step_grows_with_the_samples() -> None:
    found, expected = (_step_of_gan(samples).growth.at(512).peak() for samples in (64, 512))
    assert found.bytes == expected.bytes
    assert found.by_kind["activations"] == expected.by_kind["activations"] > 4 * 512 * 512  # of tanh, in 32 bits


def test_what_an_optimizer_computes_with_is_where_its_state_is() -> None:
    """Adamax makes tensors of a parameter's size: a rank's half of the largest weight, 64 × 512."""
    changes = _step_of_gan(64).growth.at(64).changes
    largest = max(change.bytes for change in changes if change.kind == "update")
    assert largest == 4 * 64 * 512 / 2
    assert {change.phase for change in changes if change.kind == "update" and change.bytes > 0} == {"optimizer"}


@pytest.mark.parametrize(
    ("strategy", "world", "accumulation"),
    [(Single, World(1, 1), 2), (FSDP, World(2, 8), 1)],
)
@pytest.mark.nightly
def test_a_first_step_tells_how_memory_grows_as_a_third_does(
    strategy: Callable[[], Strategy], world: World, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = _step(strategy(), world, 2, accumulation).growth
    monkeypatch.setattr(Tracking, "resized", lambda *_: None)  # so that a third step is made
    three = _step(strategy(), world, 2, accumulation).growth
    assert two.is_known
    assert two.at(2).held() == three.at(2).held()
    assert two.at(4).held() == pytest.approx(three.at(4).held(), rel=1e-3)


@pytest.mark.parametrize(("strategy", "world"), [(DDP, World(1, 2)), (FSDP, World(2, 8))])
@pytest.mark.nightly
def test_a_step_that_accumulates_follows_from_one_that_does_not(strategy: Callable[[], Strategy], world: World) -> None:
    found = _step(strategy(), world, 6).growth.accumulating().at(6).peak()
    expected = _step(strategy(), world, 6, accumulation=2).growth.at(6).peak()
    assert found.bytes == pytest.approx(expected.bytes, rel=0.02)


def test_a_simulation_leaves_the_process_as_it_was() -> None:
    before = sys.excepthook, rank_zero_only.rank  # type: ignore[attr-defined]  # Lightning's
    _step(DDP(), World(2, 2), 1)
    assert (sys.excepthook, rank_zero_only.rank) == before  # type: ignore[attr-defined]
    assert not torch.distributed.is_initialized()
