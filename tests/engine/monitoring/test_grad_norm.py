import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from lightswitch.monitoring.grad_norm import GradNorm, gradient_norm
from lightswitch.monitoring.metrics import MetricsFile
from tests.engine.curves import largest_difference
from tests.engine.fits import LANGUAGE, Fits
from tests.engine.monitoring.test_metrics import column
from tests.engine.monitoring.tiny import Regression, loader, trainer


class GradientsByHand(Callback):
    """Computes each step's norm from the numbers, at float64."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        values = [g for p in pl_module.parameters() if p.grad is not None for g in p.grad.flatten().tolist()]
        self.norms.append(math.sqrt(sum(value**2 for value in values)))


def logged_norms(directory: Path, model: LightningModule | None = None, **options: Any) -> list[float]:
    callbacks = [GradNorm(), *options.pop("callbacks", [])]
    run = trainer(directory, logger=MetricsFile(directory), callbacks=callbacks, **options)
    run.fit(model or Regression(), loader(), loader(16))
    return [float(value) for value in column(directory, "grad_norm")]


def test_it_is_the_norm_of_all_gradients_before_clipping(tmp_path: Path) -> None:
    by_hand = GradientsByHand()
    norms = logged_norms(tmp_path, callbacks=[by_hand], gradient_clip_val=1e-3)
    assert norms == pytest.approx(by_hand.norms[4::5], rel=1e-5)
    assert min(norms) > 1e-3


def test_it_is_logged_at_logged_steps_only(tmp_path: Path) -> None:
    logged_norms(tmp_path, accumulate_grad_batches=2)
    assert column(tmp_path, "step") == ["4", "9", "14", "19"]


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_free_of_the_loss_scale_of_16_mixed(tmp_path: Path, fused: bool) -> None:
    expected = logged_norms(tmp_path / "32", log_every_n_steps=1, max_steps=3)
    # Lightning turns the string "16-mixed" into "bf16-mixed" on a CPU, but takes the plugin.
    half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    norms = logged_norms(tmp_path / "16", Regression(fused=fused), log_every_n_steps=1, max_steps=3, plugins=[half])
    assert norms == pytest.approx(expected, rel=0.05)


def test_without_a_gradient_it_is_zero() -> None:
    assert gradient_norm([torch.nn.Parameter(torch.ones(2))]).item() == 0


def test_two_ranks_log_the_norm_of_one(fits: Fits) -> None:
    """Sharded ones: strategies/test_fsdp.py."""
    assert largest_difference(fits(replace(LANGUAGE, strategy="ddp"), 2)[0], fits(LANGUAGE)[0], "grad_norm") <= 1e-4
