"""Layers that are frozen while a step is under way are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lightswitch.errors import Refused
from tests.engine.fits import PLAIN, Fits
from tests.engine.plain import PlainModel
from tests.night import at_night
from tests.pool import RankFailed


class FrozenInMidStep(PlainModel):
    """Freezes a layer for the second half of each step's micro batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        count = self.trainer.accumulate_grad_batches
        self.net[0].requires_grad_(batch_idx % count < count / 2)


class FrozenInStep(PlainModel):
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(self.global_step < 2)
        return super().training_step(batch, batch_idx)


WITHIN_STEP = {
    FrozenInStep: (replace(PLAIN, module=FrozenInStep, micro_batch=None), 2),
    FrozenInMidStep: (replace(PLAIN, module=FrozenInMidStep), 0),
}


@pytest.mark.parametrize(
    ("module", "strategy"),
    [(FrozenInStep, "fsdp"), (FrozenInMidStep, "ddp"), *at_night((FrozenInStep, "ddp"), (FrozenInMidStep, "fsdp"))],
)
def test_what_is_frozen_within_a_step_is_refused(module: type[PlainModel], strategy: str, fits: Fits) -> None:
    fit, step = WITHIN_STEP[module]
    with pytest.raises(RankFailed) as failed:
        fits(replace(fit, strategy=strategy), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error) == (
        f"requires_grad of net.0.weight, net.0.bias is changed within step {step}, after its gradients were set "
        "up; set it in on_train_batch_start, at the step's first batch"
    )
