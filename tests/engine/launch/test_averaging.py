"""Stochastic weight averaging by WeightAveraging: its mean, and a run that is resumed or spread over processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, Train
from tests.engine.launch.averaging import SWA

RUN = (*PLAIN, "callbacks.swa._target_=tests.engine.launch.averaging.SWA", "callbacks.swa.start_step=8")
RUN += ("callbacks.swa.every_n_steps=2", "global_batch_size=40", "run_id=mine")


def test_the_mean_is_of_the_weights_past_the_first() -> None:
    swa, module = SWA(start_step=4, every_n_steps=2), torch.nn.Linear(1, 1, bias=False)
    averaged, means = AveragedModel(module, **swa._kwargs), []
    for step in range(1, 11):
        module.weight.data.fill_(step)
        if swa.should_update(step_idx=step - 1):
            averaged.update_parameters(module)
        means.append(averaged.module.weight.item())
    assert means[1::2] == pytest.approx([2, 4, 6, (6 + 8) / 2, (6 + 8 + 10) / 3])


def test_a_run_tests_the_mean_resumed_at_an_epochs_end_and_over_two_processes(train: Train) -> None:
    straight = train(*RUN, "trainer.max_steps=16")
    begun = train(*RUN, "trainer.max_steps=10")  # five steps are an epoch
    resumed = train(*RUN, "trainer.max_steps=16", folder=begun.folder)
    spread = train(*RUN, "trainer.max_steps=16", "strategy=ddp", "trainer.devices=2", "micro_batch_size=10", ranks=2)
    plain = train(*PLAIN, "global_batch_size=40", "trainer.max_steps=16")
    assert _tested(resumed) == _tested(straight) != _tested(plain)
    assert _tested(spread) == pytest.approx(_tested(straight), abs=1e-5)


def test_the_page_shows_it() -> None:
    shown = Path(SWA.__module__.replace(".", "/") + ".py")
    source = (CHECKOUT / shown).read_text().partition("from functools")[2]
    assert source in (CHECKOUT / "docs/bring-your-own.md").read_text()


def _tested(run: Finished) -> float:
    return json.loads((run.run_dir / "results.json").read_text())["test/loss"]
