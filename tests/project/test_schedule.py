"""Learning rates by step."""

import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from project.schedule import WarmupDecay


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)


def rates(schedule: WarmupDecay, steps: int) -> list[float]:
    optimizer = sgd()
    scheduler, seen = schedule(optimizer), []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_a_cosine_warms_up_and_ends_at_a_tenth():
    seen = rates(WarmupDecay(total_steps=100, warmup_fraction=0.1), 101)
    assert seen[:3] == pytest.approx([2 / 11, 4 / 11, 6 / 11])
    assert max(seen) == seen[10] == 2.0
    assert seen[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert seen[100] == pytest.approx(0.2)


def test_a_line_ends_at_zero_and_stays_there():
    seen = rates(WarmupDecay(total_steps=10, decay="linear", warmup_fraction=0, final_fraction=0), 13)
    assert seen[:2] == pytest.approx([2.0, 1.8])
    assert seen[10:] == [0, 0, 0]
    assert rates(WarmupDecay(total_steps=1), 1) == [2.0]
    assert WarmupDecay(total_steps=-1).over(100).factor(100) == pytest.approx(0.1)  # of a run of epochs


def test_wsd_holds_the_rate_until_the_last_fifth_of_the_steps():
    cfg = OmegaConf.load(Path(__file__).parents[2] / "conf/scheduler/wsd.yaml")
    cfg.total_steps = 105
    seen = rates(instantiate(cfg), 106)
    assert seen[5:86] == [2.0] * 81  # 5 of warm-up, 100 after it
    assert seen[86:] == pytest.approx([2.0 * left / 20 for left in range(19, -1, -1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 0}, r"total_steps is 0; expected at least 1, or -1 for the steps of the run"),
        ({"total_steps": 9, "final_fraction": float("nan")}, r"final_fraction is nan; expected a number, at least 0"),
        ({"total_steps": 9, "warmup_fraction": 1.5}, r"warmup_fraction is 1\.5; expected at least 0"),
        ({"total_steps": 9, "decay_fraction": 0}, r"decay_fraction is 0; expected more than 0, at most 1"),
        ({"total_steps": 9, "decay": "sine"}, r"decay is 'sine'; use cosine or linear"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_the_run(options, message):
    with pytest.raises(ValueError, match=message):
        WarmupDecay(**options)


@pytest.mark.parametrize("steps", [-1, math.inf])
def test_a_run_without_a_known_last_step_has_no_schedule(steps):
    with pytest.raises(ValueError, match=r"set trainer.max_steps=1000 .* or scheduler=constant"):
        WarmupDecay(total_steps=-1).over(steps)


def test_a_schedule_resumes_where_it_stood():
    optimizer = sgd()
    first = WarmupDecay(total_steps=10)(optimizer)
    optimizer.step()
    first.step()
    second = WarmupDecay(total_steps=10)(sgd())
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()


def test_lists_given_to_an_optimizer_are_plain_in_what_a_checkpoint_holds():
    cfg = OmegaConf.load(Path(__file__).parents[2] / "conf/optimizer/adamw.yaml")
    cfg.betas = [0.9, 0.95]
    optimizer = instantiate(cfg)([torch.zeros(1, requires_grad=True)])
    assert type(optimizer.param_groups[0]["betas"]) in (list, tuple)
