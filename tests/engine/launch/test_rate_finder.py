"""Lightning's LearningRateFinder: the same rate under each strategy, and no trace of the search in the run."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.engine.conftest import PLAIN_DATA, Finished, Train
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainModel
from tests.runs import runs_in

RUN = ("model._target_=tests.engine.launch.test_rate_finder.Counting", PLAIN_DATA, "model.halved=step")
RUN += ("global_batch_size=40", "trainer.max_steps=10", "trainer.log_every_n_steps=1")
FINDS = (*RUN, "callbacks=[default,lr_finder]", "callbacks.lr_finder.min_lr=1e-4", "run_id=mine")
FINDS += ("callbacks.lr_finder.num_training_steps=30",)
WAYS = {"ddp": "strategy=ddp", "fsdp": "strategy=fsdp", "fsdp1": "strategy=fsdp1"}


class Counting(PlainModel):
    """Its loss follows a buffer, which each step changes."""

    def __init__(self, lr: float = 0.05, dropout: float = 0.0, halved: Literal["epoch", "step"] | None = None) -> None:
        super().__init__(lr=lr, dropout=dropout, halved=halved)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.steps / 10)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*FINDS)


@pytest.mark.parametrize("way", WAYS)
def test_the_rate_is_that_of_one_process(way: str, alone: Finished, train: Train) -> None:
    run = train(*FINDS, WAYS[way], "trainer.devices=2", "micro_batch_size=10", ranks=2)
    assert _found(run) == _found(alone)
    assert largest_difference(run, alone) < 1e-5


def test_a_run_trains_as_one_that_was_started_with_the_rate(alone: Finished, train: Train) -> None:
    typed = train(*RUN, f"model.lr={_found(alone)}")
    assert largest_difference(alone, typed) == 0


def test_a_resumed_run_goes_on_with_the_rate(alone: Finished, train: Train) -> None:
    begun = train(*FINDS, "trainer.max_steps=6")
    resumed = train(*FINDS, folder=begun.folder)
    assert "rate       is looked for before a run's first step alone" in resumed.out
    assert largest_difference(resumed, alone) == 0


def _found(run: Finished) -> float:
    (line,) = (line for line in run.out.splitlines() if " is found, and takes the place of 0.05: " in line)
    assert (run.folder / line.split()[-1]).exists()
    return float(line.split()[1])
