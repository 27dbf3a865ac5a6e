"""Values that an optimizer or a schedule of torch's fails with are told before processes start, by their keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightswitch.launch.instantiation import refused_optimizers
from tests.engine.conftest import Train
from tests.night import at_night

_OPTIM, _SCHEDULES = "torch.optim", "torch.optim.lr_scheduler"


def _told(target: str, run_mode: str = "fit", **arguments: Any) -> list[str]:
    node = {"_target_": target, "_partial_": True, **arguments}
    return [
        str(one)
        for one in refused_optimizers(OmegaConf.create({"mode": run_mode, "tuned": node, "model": {"by": "${tuned}"}}))
    ]


@pytest.mark.parametrize(
    ("target", "good", "bad"),
    [
        ("Adam", {}, {"betas": [0.9]}),
        ("AdamW", {"lr": 1e-3}, {"betas": 0.9}),
        ("NAdam", {"lr": 1e-3}, {"betas": [0.9, 0.9, 0.9]}),  # which its constructor takes, and its step does not
        ("AdamW", {}, {"betas": [0.9], "eps": -1, "weight_decay": -0.1}),
        ("SGD", {"nesterov": True, "momentum": 0.9}, {"dampening": 0.5}),
        ("Rprop", {"lr": 0.1}, {"etas": [0.5]}),
        ("lr_scheduler.StepLR", {"gamma": 0.5}, {"step_size": 0}),
        ("lr_scheduler.OneCycleLR", {"max_lr": 0.1, "total_steps": 9}, {"pct_start": 3.0}),
        ("lr_scheduler.ReduceLROnPlateau", {"factor": 0.5}, {"mode": "least"}),
    ],
)
def test_each_value_that_fails_is_told_by_its_key(target: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    told = _told(f"{_OPTIM}.{target}", **good, **bad)
    assert {line.partition("=")[0] for line in told} == {f"tuned.{key}" for key in bad}
    assert not _told(f"{_OPTIM}.{target}", run_mode="test", **bad)  # which makes none


def test_what_the_model_may_yet_add_or_a_gpu_take_is_let_through() -> None:
    assert not _told(f"{_SCHEDULES}.CosineAnnealingLR", eta_min=0.0)  # its T_max
    assert not _told(f"{_SCHEDULES}.OneCycleLR", max_lr=1.0)  # its total_steps
    assert not _told(f"{_OPTIM}.SparseAdam", eps=1e-6)  # its gradients are sparse
    assert not _told(f"{_OPTIM}.AdamW", capturable=True)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD"):
        assert not _told(f"{_OPTIM}.{name}", lr=1e-3, foreach=True)


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    assert _told(f"{_OPTIM}.AdamW", betas=[0.9])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["fit", *at_night("plan")])
def test_a_list_that_is_too_short_is_a_line(train: Train, mode: str) -> None:
    run = train(f"mode={mode}", "optimizer.betas=[0.9]", "strategy=ddp", "trainer.devices=2", check=False)
    assert run.returncode == 2
    assert run.err.splitlines() == [
        "error: optimizer.betas=[0.9]: AdamW fails with it: IndexError: list index out of range; its default is "
        "[0.9,0.999]"
    ]
