"""Layers that are frozen while a step is under way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lightswitch.errors import Refused
from tests.engine.curves import largest_difference
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


MID_STEP = replace(PLAIN, module=FrozenInMidStep)
IN_STEP = replace(PLAIN, module=FrozenInStep, micro_batch=None)


@pytest.mark.parametrize("strategy", ["ddp", *at_night("fsdp")])
def test_gradients_of_what_is_frozen_in_mid_step_are_averaged(strategy: str, fits: Fits) -> None:
    (alone,), run = fits(MID_STEP), fits(replace(MID_STEP, strategy=strategy), 2)[0]
    assert largest_difference(run, alone) <= 1e-5


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("ddp")])
def test_what_is_frozen_in_training_step_is_told(strategy: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(IN_STEP, strategy=strategy))
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error) == (
        "requires_grad of net.0.weight, net.0.bias is changed within step 2, after its gradients were set "
        "up; set it in on_train_batch_start, at the step's first batch"
    )
