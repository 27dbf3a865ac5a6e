"""Learning rates by step."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from project import schedule


def rates(scheduled, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler, seen = scheduled(optimizer), []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_warms_up_and_ends_at_a_tenth():
    seen = rates(partial(schedule.cosine, total_steps=100, warmup_fraction=0.1), 101)
    assert seen[:3] == pytest.approx([2 / 11, 4 / 11, 6 / 11])
    assert max(seen) == seen[10] == 2.0
    assert seen[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert seen[100] == pytest.approx(0.2)


def test_linear_ends_at_zero_and_stays_there():
    seen = rates(partial(schedule.linear, total_steps=10, warmup_fraction=0), 13)
    assert seen[:2] == pytest.approx([2.0, 1.8])
    assert seen[10:] == [0, 0, 0]


def test_one_step_is_enough_for_a_schedule():
    assert rates(partial(schedule.cosine, total_steps=1), 1) == [2.0]


@pytest.mark.parametrize("scheduled", [schedule.cosine, schedule.linear])
def test_a_run_without_a_last_step_is_refused(scheduled):
    with pytest.raises(ValueError, match=r"total_steps is -1.*set trainer.max_steps=1000 .* or scheduler=constant"):
        rates(partial(scheduled, total_steps=-1), 1)


def test_the_warm_up_is_a_part_of_the_run():
    with pytest.raises(ValueError, match=r"warmup_fraction is 1\.5"):
        rates(partial(schedule.cosine, total_steps=10, warmup_fraction=1.5), 1)


def test_a_schedule_resumes_where_it_stood():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    first = schedule.cosine(optimizer, total_steps=10)
    optimizer.step()
    first.step()
    second = schedule.cosine(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0), total_steps=10)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()


def test_lists_given_to_an_optimizer_are_plain_in_what_a_checkpoint_holds():
    cfg = OmegaConf.load(Path(__file__).parents[2] / "conf/optimizer/adamw.yaml")
    cfg.betas = [0.9, 0.95]
    optimizer = instantiate(cfg)([torch.zeros(1, requires_grad=True)])
    assert type(optimizer.param_groups[0]["betas"]) in (list, tuple)
