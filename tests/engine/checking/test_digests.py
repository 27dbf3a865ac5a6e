"""Digests are linear, whatever the shards, and say how far two tensors are apart; what is rounding is measured."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightswitch.checking.causes import REMEDIES, of_difference, of_one
from lightswitch.checking.comparison import Comparison, State, States
from lightswitch.checking.digests import Digest, merged, minus, norm, shards
from lightswitch.checkpoints.shards import Piece
from tests.engine.checking import modules
from tests.engine.checking.measured import trial
from tests.night import at_night
from tests.pool import Pool
from tests.project.promises import EXPECTED
from tests.runs import CHECKOUT

EPS = 2.0**-23


def _digest(tensor: torch.Tensor) -> Digest:
    return shards({"it": tensor})["it"].digest


@pytest.mark.parametrize("shape", [(), (1025, 3), (1500, 1111)])
def test_the_norm_of_a_difference_is_estimated(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    apart = minus(_digest(one), _digest(other))
    assert norm(apart) == pytest.approx((one - other).norm().item(), rel=0.6)
    assert apart == pytest.approx(_digest(one - other), abs=1e-6)


def test_pieces_of_a_tensor_add_up_to_its_digest() -> None:
    whole = torch.randn(3000, 7)
    cuts = [0, 1, 1024, 5000, 5000, 20_999, 21_000]
    pieces = [Piece(whole.reshape(-1)[first:end].clone(), whole.shape, first) for first, end in pairwise(cuts)]
    found = merged([shards({"it": piece}) for piece in pieces])
    assert found.digests["it"] == pytest.approx(_digest(whole), rel=1e-9)
    assert not found.unequal


def test_one_bit_is_seen_and_equal_copies_are_not() -> None:
    one, other = torch.ones(100), torch.ones(100)
    other[17] = torch.nextafter(other[17], torch.tensor(2.0))
    assert 0 < norm(minus(_digest(other), _digest(one))) < 1e-6
    ranks = [shards({"it": tensor, "odd": torch.tensor(torch.nan)}) for tensor in (one, other, one)]
    assert merged(ranks).unequal == {"it": [1]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_has_a_digest(dtype: torch.dtype) -> None:
    one, other = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    other[2] = 0
    assert norm(minus(_digest(one), _digest(other))) == pytest.approx(1)


def _states(*values: float, loss: float = 1.0) -> States:
    return {
        step: State({"model.w": _digest(torch.full((64,), value))}, {"train/loss": loss}, step, {})
        for step, value in enumerate(values)
    }


def _comparison(one: States, again: States, nudged: States) -> Comparison:
    return Comparison(one, lambda: again, lambda: nudged, ["w"], EPS)


def test_what_a_nudge_comes_to_is_rounding_and_a_weight_that_never_moves_is_not() -> None:
    one = _states(1.0, 1.001)
    steady = _comparison(one, one, _states(1 + 1e-6, 1.001 + 1e-6))
    chaotic = _comparison(one, one, _states(1 + 1e-6, 1.002))
    never_moved = _states(1.0, 1.0)
    first = steady.parameters(never_moved).first
    assert first is not None
    assert (first.name, first.step) == ("w", 1)
    assert first.relative == pytest.approx(1e-3, rel=0.01)
    assert chaotic.parameters(never_moved).first is None
    assert steady.parameters(_states(1.0, 1.001 + 5e-7)).first is None


def test_a_nudge_says_nothing_of_what_differs_between_equal_starts() -> None:
    one, again = _states(1.0, 1.5), _states(1.0, 1.2)
    comparison = _comparison(one, again, _states(1.0, 1.3))
    assert comparison.again(again, one)[1].first is not None
    assert comparison.parameters(again).first is not None


def test_what_is_not_finite_in_one_run_alone_differs() -> None:
    one = _states(1.0, 1.0)
    comparison = _comparison(one, one, one)
    assert comparison.loss(_states(1.0, 1.0, loss=math.nan)).first is not None
    assert comparison.parameters(_states(1.0, math.nan)).first is not None
    lost = _states(math.nan, math.nan, loss=math.nan)
    assert _comparison(lost, lost, lost).loss(lost).first is None


# Each of the ten causes is named from what a module does, and none where it keeps the promises


CAUSES = {
    modules.Unseeded: "generator that nobody seeds",
    modules.Replaying: "state in Python objects",
    modules.PastLightning: "optimizer stepped past Lightning",
    modules.Normed: "batch norm",
    modules.OverItems: "loss that is no mean over samples",
    modules.Dice: "loss over the local batch",
    modules.Noisy: "noise by rank",
    modules.MovedInForward: "weights written outside of the optimizer",
    modules.ScaledByRank: "weights written outside of the optimizer",
    modules.Queued: "buffers that ranks change each for itself",
}
IN_ONE_PROCESS = (modules.Unseeded, modules.Replaying, modules.PastLightning)
DAILY = (modules.Unseeded, modules.Dice)


def test_each_cause_has_a_module_and_a_remedy() -> None:
    assert {*CAUSES.values(), "operation that the strategy can't do"} == REMEDIES.keys()
    page = (CHECKOUT / "docs" / "promises.md").read_text()
    assert [name for name, remedy in REMEDIES.items() if f"| {name} |" not in page or remedy not in page] == []
    assert {*EXPECTED} < REMEDIES.keys()  # those of the table of a fork


@pytest.mark.parametrize("module", [*DAILY, *at_night(*(CAUSES.keys() - {*DAILY}))], ids=lambda module: module.__name__)
def test_what_differs_in_one_process_or_under_a_strategy_has_its_cause(
    module: type[pl.LightningModule], pool: Pool, tmp_path: Path
) -> None:
    found = trial(pool, tmp_path, module)
    causes = list(of_one(found.one, found.comparison))
    if module not in IN_ONE_PROCESS:
        assert not causes
        assert found.comparison.all_tensors(found.whole).first is not None
        causes = [of_difference(found.evidence, found.comparison, found.whole)]
    assert [cause.name for cause in causes] == [CAUSES[module]], causes


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_2", "ddp", "deepspeed_stage_3")])
def test_a_good_module_has_no_difference(strategy: str, pool: Pool, tmp_path: Path) -> None:
    found = trial(pool, tmp_path, modules.Good, strategy)
    whole = found.whole
    assert set(whole) == set(found.comparison.one)
    assert len(whole) == 5
    for compared in (found.comparison.all_tensors(whole), found.comparison.loss(whole)):
        assert compared.first is None
        assert compared.count
        assert compared.largest < 1e-5
    assert not list(of_one(found.one, found.comparison))
