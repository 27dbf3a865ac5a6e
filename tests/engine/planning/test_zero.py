"""A plan says what real ranks hold under DeepSpeed's stages: its engine runs on tensors without values."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightswitch.deepspeed.strategy import DeepSpeed
from lightswitch.errors import NeedsValues
from lightswitch.planning.fakes import World, plan_in_bfloat16
from lightswitch.planning.simulation import simulate
from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.fsdp import FSDP
from tests.engine.planning.modules import LooksAtValues, WaitsForAValue
from tests.engine.planning.zero import CASES, RANKS, Case, held
from tests.night import at_night
from tests.pool import Pool

DAILY = {"language 1", "language 3, offloaded", "language 2, bf16-true"}


@pytest.mark.filterwarnings("ignore")  # what DeepSpeed and a Trainer without a run around it warn of
@pytest.mark.parametrize("cases", [DAILY, *at_night(CASES.keys() - DAILY)])
def test_a_plan_says_what_a_rank_holds_under_deepspeed(cases: set[str], pool: Pool) -> None:
    of_ranks = pool(RANKS)(held, cases)
    for name in cases:
        case = CASES[name]
        step = simulate(case.work(), case.strategy(), World(1, RANKS))
        peak = step.growth.at(case.samples).peak()
        real = min((told[name] for told in of_ranks), key=lambda told: told["bytes"])  # of the rank with the least
        assert peak.bytes == pytest.approx(real["bytes"], rel=0.01), name
        assert peak.by_kind == pytest.approx(real["by_kind"], abs=0.01 * real["bytes"]), name
        assert case.accumulation * step.micro_flops == real["flops"], name
        sent = (*step.micro_collectives[: None if case.accumulation > 1 else 0], *step.last_collectives)
        planned = sorted([one.name, one.bytes] for one in sent if one.name != "broadcast")  # of buffers, after a step
        assert planned == real["sent"], name


def test_states_are_those_of_zeros_stages() -> None:
    """33,952 parameters in 32 bits over 8 ranks: Adam's two moments and the copy that it steps, a counter a group."""
    part = 33_952 // 8
    for stage in (1, 2, 3):
        case = Case(CASES["language 1"].model, {"stage": stage}, accumulation=1)
        step = simulate(case.work(), case.strategy(), World(2, 4, rank=5))
        kinds = step.growth.at(case.samples).peak().by_kind
        assert kinds["parameters"] == 4 * (part if stage == 3 else 33_952)
        assert kinds["optimizer"] == pytest.approx(3 * 4 * part, abs=3 * 4 * 16 + 16)  # parts are padded
        assert step.optimizer_bytes == pytest.approx(2 * 4 * 33_952, rel=0.01)
        assert step.parameter_bytes == 4 * 33_952


def _with_a_frozen_table() -> LightningModule:
    model = CASES["language 1"].model()
    model.table = nn.Parameter(torch.zeros(1000, 100), requires_grad=False)
    return model


@pytest.mark.parametrize("strategy", [DDP, FSDP, partial(DeepSpeed, stage=2)])
def test_what_is_frozen_has_no_state_of_an_optimizer(strategy: Callable[[], Strategy]) -> None:
    case = Case(CASES["language 1"].model, {"stage": 2}, accumulation=1)
    step = simulate(replace(case.work(), model=_with_a_frozen_table), strategy(), World(1, 2))
    assert step.parameters == 33_952 + 100_000
    assert step.optimizer_bytes == pytest.approx(2 * 4 * 33_952, rel=0.01)


def test_float16_takes_weights_in_16_bits_and_copies_in_32() -> None:
    case = Case(CASES["language 1"].model, {"stage": 1}, "bf16-mixed", accumulation=1)
    strategy = case.strategy()
    plan_in_bfloat16(strategy)
    kinds = simulate(case.work(), strategy, World(2, 4)).growth.at(case.samples).peak().by_kind
    assert kinds["parameters"] == 2 * 33_952
    assert kinds["optimizer"] == pytest.approx(3 * 4 * 33_952 / 8, abs=3 * 4 * 16 + 16)


def test_only_what_the_model_asks_is_told_as_guessed() -> None:
    case = Case(LooksAtValues, {"stage": 2})
    guessed = simulate(case.work(), case.strategy(), World(1, RANKS)).guessed
    assert sum(guessed.values()) == 4
    assert all("modules.py:" in place for place in guessed)


def test_the_process_is_as_it_was_after_a_step_that_fails() -> None:
    before, case = dict(os.environ), Case(WaitsForAValue, {"stage": 2})
    comm = importlib.import_module("deepspeed.comm")
    with pytest.raises(NeedsValues):
        simulate(case.work(), case.strategy(), World(1, RANKS))
    assert (dict(os.environ), comm.is_initialized(), torch.distributed.is_initialized()) == (before, False, False)
