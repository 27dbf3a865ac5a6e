"""A plan says what real ranks hold under DeepSpeed's stages: its engine runs on tensors without values."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightswitch import patches
from lightswitch.deepspeed.strategy import DeepSpeed
from lightswitch.errors import NeedsValues
from lightswitch.loop.loops import replace_loops
from lightswitch.planning.fakes import World, plan_in_bfloat16
from lightswitch.planning.simulation import Work, simulate
from lightswitch.planning.tracking import Tracking
from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.fsdp import FSDP
from tests.engine.foreign import Late
from tests.engine.models.language import LanguageModel
from tests.engine.models.pictures import PatchClassifier
from tests.engine.planning.modules import LooksAtValues, WaitsForAValue
from tests.night import at_night
from tests.pool import Pool

RANKS = 2
BUCKETS = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}  # the default's would hide all else
OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}


def _language() -> LightningModule:
    return LanguageModel(partial(torch.optim.AdamW, lr=1e-3))


@dataclass(frozen=True)
class Case:
    """A model, a strategy's arguments, and a precision."""

    model: Callable[[], LightningModule]
    options: dict[str, Any]
    precision: str = "32-true"
    accumulation: int = 2
    samples: int = 6

    def work(self) -> Work:
        """Return what is simulated."""
        options = {"gradient_clip_val": 1.0, "precision": self.precision}
        return Work(self.model, self.batch, True, self.samples, self.accumulation, options)

    def strategy(self) -> DeepSpeed:
        """Return the strategy, new."""
        return DeepSpeed(**self.options, **BUCKETS)

    def batch(self, samples: int) -> list[Tensor]:
        """Return a micro batch of so many samples."""
        if self.model is _language:
            return [torch.ones(samples, 32, dtype=torch.long), torch.ones(samples, 32, dtype=torch.long)]
        return [torch.linspace(0, 1, samples * 64).view(samples, 1, 8, 8), torch.zeros(samples, dtype=torch.long)]


CASES = {
    **{f"language {stage}": Case(_language, {"stage": stage}) for stage in (1, 3)},
    "language 3, offloaded": Case(_language, {"stage": 3, **OFFLOADED}),
    "language 2, bf16-true": Case(_language, {"stage": 2}, "bf16-true"),
    "pictures 2": Case(PatchClassifier, {"stage": 2}, accumulation=1),
    "late 3": Case(Late, {"stage": 3}),
}


def held(names: Collection[str]) -> dict[str, dict[str, Any]]:
    """What this rank holds, by case."""
    return {name: _held(CASES[name]) for name in sorted(names)}


class _Endless:
    def __init__(self, batch: Callable[[], list[Tensor]]) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            yield self._batch()


def _held(case: Case) -> dict[str, Any]:
    """The least of the peaks of steps 4 and 5: in the first three, writes to weights are looked for."""
    model, tracking = case.model(), Tracking()
    patches.replace(model, "log", lambda *_, **__: None)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=case.strategy(), callbacks=[tracking], max_steps=5,
        accumulate_grad_batches=case.accumulation, limit_val_batches=0, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, check_val_every_n_epoch=None, val_check_interval=1_000, **case.work().options,
    )  # fmt: skip
    replace_loops(trainer)  # as in a run; before a validation, writes to weights would be looked for
    trainer.fit(model, _Endless(partial(case.batch, case.samples)))
    steps = tracking.steps()[3:]
    least = min((step.timeline.peak() for step in steps), key=lambda peak: peak.bytes)
    # at stage 3, ranks broadcast the order of modules until they agree: a plan has the broadcasts of buffers alone
    all_sent = (one for micro in steps[-1].collectives for one in micro)
    sent = sorted([one.name, one.bytes] for one in all_sent if one.name != "broadcast")
    return {**asdict(least), "flops": steps[0].flops, "sent": sent}


@pytest.mark.filterwarnings("ignore")  # what DeepSpeed and a Trainer without a run around it warn of
@pytest.mark.nightly
def test_a_plan_says_what_a_rank_holds_under_deepspeed(pool: Pool) -> None:
    of_ranks = pool(RANKS)(held, CASES)
    for name, case in CASES.items():
        step = simulate(case.work(), case.strategy(), World(1, RANKS))
        peak = step.growth.at(case.samples).peak()
        real = min((told[name] for told in of_ranks), key=lambda told: told["bytes"])  # of the rank with the least
        assert peak.bytes == pytest.approx(real["bytes"], rel=0.01), name
        assert peak.by_kind == pytest.approx(real["by_kind"], abs=0.01 * real["bytes"]), name
        assert case.accumulation * step.micro_flops == real["flops"], name
        sent = (*step.micro_collectives[: None if case.accumulation > 1 else 0], *step.last_collectives)
        planned = sorted([one.name, one.bytes] for one in sent if one.name != "broadcast")  # of buffers, after a step
        assert planned == real["sent"], name


@pytest.mark.nightly
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


@pytest.mark.parametrize("strategy", [partial(DeepSpeed, stage=2), *at_night(DDP, FSDP)])
def test_what_is_frozen_has_no_state_of_an_optimizer(strategy: Callable[[], Strategy]) -> None:
    case = Case(CASES["language 1"].model, {"stage": 2}, accumulation=1)
    step = simulate(replace(case.work(), model=_with_a_frozen_table), strategy(), World(1, 2))
    assert step.parameters == 33_952 + 100_000
    assert step.optimizer_bytes == pytest.approx(2 * 4 * 33_952, rel=0.01)


@pytest.mark.nightly
def test_float16_takes_weights_in_16_bits_and_copies_in_32() -> None:
    case = Case(CASES["language 1"].model, {"stage": 1}, "bf16-mixed", accumulation=1)
    strategy = case.strategy()
    plan_in_bfloat16(strategy)
    kinds = simulate(case.work(), strategy, World(2, 4)).growth.at(case.samples).peak().by_kind
    assert kinds["parameters"] == 2 * 33_952
    assert kinds["optimizer"] == pytest.approx(3 * 4 * 33_952 / 8, abs=3 * 4 * 16 + 16)


@pytest.mark.nightly
def test_only_what_the_model_asks_is_told_as_guessed() -> None:
    case = Case(LooksAtValues, {"stage": 2})
    guessed = simulate(case.work(), case.strategy(), World(1, RANKS)).guessed
    assert sum(guessed.values()) == 4
    assert all("modules.py:" in place for place in guessed)


@pytest.mark.nightly
def test_the_process_is_as_it_was_after_a_step_that_fails() -> None:
    before, case = dict(os.environ), Case(WaitsForAValue, {"stage": 2})
    comm = importlib.import_module("deepspeed.comm")
    with pytest.raises(NeedsValues):
        simulate(case.work(), case.strategy(), World(1, RANKS))
    assert (dict(os.environ), comm.is_initialized(), torch.distributed.is_initialized()) == (before, False, False)
