"""A loss scale goes on from DeepSpeed to torch's GradScaler and back, and grows and falls at the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightswitch.deepspeed.state import loss_scale_of, resume_loss_scale

WINDOW = 3


def of_deepspeed(overflows: tuple[int, ...] = (), steps: int = 0) -> Any:
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    scaler = scalers.DynamicLossScaler(2.0**10, WINDOW, 1, 1, consecutive_hysteresis=False)
    for step in range(steps):
        scaler.update_scale(step in overflows)
    return scaler


def of_torch(state: dict[str, Any]) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(state)
    return scaler


def grown(scaler: Any, steps: int = 3 * WINDOW) -> list[float]:
    """The scale after each of some good steps."""
    if not isinstance(scaler, torch.amp.GradScaler):
        return [(scaler.update_scale(False), scaler.cur_scale)[1] for _ in range(steps)]
    weight, scales = torch.zeros(1, requires_grad=True), []
    optimizer = torch.optim.SGD([weight])
    for _ in range(steps):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's scaler tells of an overflow on the first rank, and asks which one this is."""
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(scalers.dist, "get_rank", lambda: 0)


@pytest.mark.parametrize("steps", range(3 * WINDOW))
@pytest.mark.parametrize("overflows", [(), (0,), (1,), (0, 4)])
def test_it_goes_on_as_if_nothing_had_happened(steps: int, overflows: tuple[int, ...]) -> None:
    state = loss_scale_of(of_deepspeed(overflows, steps))
    resume_loss_scale(again := of_deepspeed(steps=5), state)
    expected = grown(of_deepspeed(overflows, steps))
    assert grown(again) == expected
    assert grown(of_torch(state)) == expected
    resume_loss_scale(back := of_deepspeed(), of_torch(state).state_dict())
    assert grown(back) == expected


def test_a_fixed_scale_stays_what_the_config_says() -> None:
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    fixed = scalers.LossScaler(128.0)
    resume_loss_scale(fixed, loss_scale_of(of_deepspeed()))
    assert fixed.loss_scale == 128.0
    assert loss_scale_of(fixed) == {}
