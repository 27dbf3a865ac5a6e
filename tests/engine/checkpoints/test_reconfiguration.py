"""What is configured otherwise on a resume, in optimizers and schedules, has its effect; all else goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lightswitch.checkpoints.optimizers import options_of
from lightswitch.checkpoints.reconfiguration import changed, regrouped
from tests.engine.conftest import PLAIN, Train

Make = Callable[[Optimizer], LRScheduler]
SCHEDULES: dict[str, Make] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "from zero": lambda optimizer: LambdaLR(optimizer, lambda step: min(step / 4, 1.0)),
    "in sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 20)], [3]
    ),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=20),
    "by a metric": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}


class Run:
    def __init__(self, make: Make, lr: float, **options: Any) -> None:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.zeros(1)
        self.optimizer = AdamW([weight], lr=lr, **options)
        self.schedule = make(self.optimizer)
        self.configured = self.state()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return options_of(self.optimizer.param_groups[0]), self.schedule.state_dict()

    def steps(self, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.schedule.step(*([1.0] if isinstance(self.schedule, ReduceLROnPlateau) else []))
        return rates

    def resume(self, other: Run) -> None:
        options, state = other.state()
        self.optimizer.param_groups[0].update(regrouped(options, other.configured[0], self.configured[0]))
        self.schedule.load_state_dict(changed(state, other.configured[1], self.configured[1]))


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # SequentialLR's own
@pytest.mark.parametrize("name", SCHEDULES)
def test_another_rate_changes_the_schedule_by_the_same_factor(name: str) -> None:
    before, same, lower = (Run(SCHEDULES[name], lr) for lr in (0.1, 0.1, 0.05))
    before.steps(6)
    for resumed in (same, lower):
        resumed.resume(before)
    assert lower.schedule.get_last_lr() == pytest.approx([rate / 2 for rate in before.schedule.get_last_lr()])
    expected = before.steps(6)
    assert same.steps(6) == expected
    assert lower.steps(6) == pytest.approx([rate / 2 for rate in expected])


def test_an_option_that_is_configured_as_before_keeps_its_last_value() -> None:
    before, now = Run(SCHEDULES["cosine"], 0.1, betas=(0.9, 0.99)), Run(SCHEDULES["cosine"], 0.1, weight_decay=0.3)
    before.optimizer.param_groups[0]["eps"] = 1e-3  # as a callback may set it
    now.resume(before)
    (group,) = now.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.3, (0.9, 0.999), 1e-3)


def test_other_milestones_are_those_that_are_configured() -> None:
    before = Run(lambda optimizer: MultiStepLR(optimizer, [4, 12]), 0.1)
    now = Run(lambda optimizer: MultiStepLR(optimizer, [4, 8]), 0.1)
    before.steps(6)
    now.resume(before)
    assert now.steps(4) == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert sorted(now.schedule.milestones.elements()) == [4, 8]


RUN = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_run_takes_another_rate(strategy: str, train: Train) -> None:
    first = train(*RUN, "model.lr=0.1", "trainer.max_steps=2")
    resumed = train(*RUN, "model.lr=0.01", "trainer.max_steps=4", f"strategy={strategy}", folder=first.folder)
    assert "with model.lr=0.01 (was 0.1)" in resumed.out
    assert [*resumed.column("lr-AdamW").values()] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    again = train(*RUN, "model.lr=0.01", "trainer.max_steps=5", f"strategy={strategy}", folder=first.folder)
    assert [*again.column("lr-AdamW").values()] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.01])


def test_a_run_that_was_stopped_early_goes_on_with_more_patience(train: Train) -> None:
    early = "callbacks.early"
    run = (*RUN, f"{early}._target_=lightning.pytorch.callbacks.EarlyStopping", f"{early}.monitor=val/loss")
    run += (f"{early}.mode=max", "trainer.val_check_interval=1")  # no validation is better than the first
    stopped = train(*run, f"{early}.patience=1", "trainer.max_steps=10")
    assert max(stopped.column("val/loss")) == 1
    resumed = train(*run, f"{early}.patience=3", "trainer.max_steps=20", folder=stopped.folder)
    assert max(resumed.column("val/loss")) == 3


def test_a_run_goes_on_by_a_longer_schedule(train: Train) -> None:
    run = ("model._target_=tests.engine.plain.CosineModel", *RUN[1:])
    whole = train(*run, "trainer.max_steps=8")
    first = train(*run, "trainer.max_steps=4")
    resumed = train(*run, "trainer.max_steps=8", folder=first.folder)
    rates = [*whole.column("lr-SGD").values()]
    assert [*resumed.column("lr-SGD").values()][4:] == pytest.approx(rates[4:])
    assert rates[4:] == pytest.approx([0.025, 0.0154328, 0.00732233, 0.00190301], rel=1e-4)
