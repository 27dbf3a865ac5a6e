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


OF_THE_ROOT = "fsdp units=[net.3]"  # the root gathers net.0 for the whole step
WITHIN_STEP = {
    OF_THE_ROOT: "requires_grad of net.0.weight, net.0.bias is changed within a step, where fsdp has gathered it",
    "ddp": "net.0.weight, net.0.bias did not contribute to the loss, but ddp waits for every gradient",
}


@pytest.mark.parametrize(
    ("module", "strategy"), [(FrozenInStep, OF_THE_ROOT), (FrozenInMidStep, "ddp"), *at_night((FrozenInStep, "ddp"))]
)
def test_what_is_frozen_within_a_step_is_refused(module: type[PlainModel], strategy: str, fits: Fits) -> None:
    micro_batch = None if module is FrozenInStep else PLAIN.micro_batch
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, module=module, micro_batch=micro_batch, strategy=strategy), 2)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(WITHIN_STEP[strategy])
