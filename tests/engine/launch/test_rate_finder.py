"""Lightning's LearningRateFinder: the same rate under each strategy, and no trace of the search in the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import pytest
import torch
from lightning.pytorch.tuner.lr_finder import _ExponentialLR, _LinearLR
from torch import Tensor

from lightswitch.launch.rate_finder import learning_rate_of, rising
from tests.engine.conftest import PLAIN_DATA, Finished, Train
from tests.engine.curves import largest_difference
from tests.engine.plain import PartialModel, PlainModel
from tests.night import at_night
from tests.runs import runs_in

RUN = ("model._target_=tests.engine.launch.test_rate_finder.Counting", PLAIN_DATA, "model.halved=step")
RUN += ("global_batch_size=40", "trainer.max_steps=10", "trainer.log_every_n_steps=1")
FINDS = (*RUN, "callbacks=[default,lr_finder]", "callbacks.lr_finder.min_lr=1e-4", "run_id=mine")
FINDS += ("callbacks.lr_finder.num_training_steps=30",)
_STAGE_3 = "stage:3,stage3_param_persistence_threshold:20"  # biases stay gathered
ZERO = ("strategy=deepspeed", f"trainer.strategy.config={{zero_optimization:{{{_STAGE_3}}}}}")
OTHERS = ("ddp", "fsdp1", "deepspeed_stage_2_offload")
WAYS = {"zero 3": [*ZERO], **{name: [f"strategy={name}"] for name in ("fsdp", *OTHERS)}}
ON_TWO = ("trainer.devices=2", "micro_batch_size=10")


class Counting(PlainModel):
    """Its loss follows a buffer, which each step changes."""

    def __init__(self, lr: float = 0.05, dropout: float = 0.0, halved: Literal["epoch", "step"] | None = None) -> None:
        super().__init__(lr=lr, dropout=dropout, halved=halved)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.steps / 10)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1


class AtOnce(Counting):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=self.hparams.lr)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """A run of each kind, once."""
    return cache(runs_in(tmp_path_factory.mktemp("once")))


@pytest.fixture(scope="module")
def alone(once: Callable[..., Finished]) -> Finished:
    return once(*FINDS)


@pytest.mark.parametrize("way", ["fsdp", "zero 3", *at_night(*OTHERS)])
def test_the_rate_is_that_of_one_process(way: str, alone: Finished, once: Callable[..., Finished]) -> None:
    run = once(*FINDS, *WAYS[way], *ON_TWO, ranks=2)
    assert rate_of(run) == rate_of(alone)
    assert largest_difference(run, alone) < 1e-5


def test_a_run_trains_as_one_that_was_started_with_the_rate(alone: Finished, train: Train) -> None:
    typed = train(*RUN, f"model.lr={rate_of(alone)}")
    assert largest_difference(alone, typed) == 0


def test_so_does_a_run_under_zero(once: Callable[..., Finished], train: Train) -> None:
    run = once(*FINDS, *ZERO, *ON_TWO, ranks=2)
    typed = train(*RUN, f"model.lr={rate_of(run)}", *ZERO, *ON_TWO, ranks=2)
    assert largest_difference(run, typed) == 0


def test_a_resumed_run_goes_on_with_the_rate(alone: Finished, train: Train) -> None:
    begun = train(*FINDS, "trainer.max_steps=6")
    resumed = train(*FINDS, folder=begun.folder)
    assert "rate       is looked for before a run's first step alone" in resumed.out
    assert largest_difference(resumed, alone) == 0


@pytest.mark.nightly
def test_a_rate_that_was_found_goes_on_under_zero_and_back(alone: Finished, train: Train) -> None:
    begun = train(*FINDS, "trainer.max_steps=4")
    under_zero = train(*FINDS, *ZERO, *ON_TWO, "trainer.max_steps=8", folder=begun.folder, ranks=2)
    resumed = train(*FINDS, folder=under_zero.folder)
    assert len(resumed.column("train/loss")) == 10
    assert largest_difference(resumed, alone) < 1e-5


def rate_of(run: Finished) -> float:
    (line,) = (line for line in run.out.splitlines() if " is found, and takes the place of 0.05: " in line)
    assert (run.folder / line.split()[-1]).exists()
    return float(line.split()[1])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("callbacks.lr_finder.attr_name=dropout", "configure_optimizers of Counting does not follow dropout; "),
        ("callbacks.lr_finder.attr_name=rate", "LearningRateFinder: Counting has no learning rate in rate; let "),
        ("callbacks.lr_finder.num_training_steps=9", "LearningRateFinder: no rate is found in 9 steps, of which "),
    ],
)
def test_what_finds_no_rate_is_refused_in_a_line(typed: str, told: str, train: Train) -> None:
    refused = train(*FINDS, typed, check=False)
    assert refused.returncode == 2
    (line,) = refused.err.splitlines()
    assert told in line


def test_an_optimizer_that_can_not_be_made_twice_is_refused_under_zero(train: Train) -> None:
    model = "model._target_=tests.engine.launch.test_rate_finder.AtOnce"
    refused = train(*FINDS, model, *ZERO, ranks=2, check=False)
    assert refused.returncode == 2
    told = "Adagrad makes its state before the first step, where DeepSpeed can't take it anew; use strategy=fsdp"
    assert refused.err.splitlines()[0] == f"error: {told}"


def test_templates_keep_the_rate_in_a_partial_of_the_optimizer() -> None:
    module = PartialModel(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
    rate = learning_rate_of(module, "optimizer")
    assert (rate.name, rate.value) == ("optimizer", 0.1)
    rate.set(0.2)
    (group,) = module.configure_optimizers().param_groups
    assert (group["lr"], group["weight_decay"], rate.value) == (0.2, 0.5, 0.2)


def test_the_rates_are_those_of_lightning() -> None:
    for mode, kind in (("exponential", _ExponentialLR), ("linear", _LinearLR)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1e-3)
        schedule, rates = kind(optimizer, 1.0, 20), []
        for _ in range(20):
            rates.append(schedule.lr[0])
            optimizer.step()
            schedule.step()
        assert rising(1e-3, 1.0, 20, mode) == pytest.approx(rates)
