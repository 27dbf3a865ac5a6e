"""Digests are linear, whatever the shards, and say how far two tensors are apart; what is rounding is measured."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from lightswitch.checking.comparison import Comparison, State, States
from lightswitch.checking.digests import Digest, merged, minus, norm, shards
from lightswitch.checkpoints.shards import Piece

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
