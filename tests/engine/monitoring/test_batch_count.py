"""An epoch of batches in which no optimizer step is counted is told when it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightswitch.monitoring.notices import StepsAreCounted
from tests.engine.fits import PLAIN, trained
from tests.engine.plain import ManualModel, PlainModel
from tests.pool import Pool


class PastLightning(ManualModel):
    """Moves its weights by itself, past its optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = PlainModel.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(0.05 * parameter.grad)
                parameter.grad = None
        return loss


FIT = replace(PLAIN, callbacks=(StepsAreCounted,), micro_batch=None)
NO_STEP = "no step    an epoch of 9 batches, and no optimizer step was counted"


def test_steps_that_are_not_counted_are_told_after_the_first_epoch(pool: Pool) -> None:
    by_hand = replace(FIT, module=PastLightning, arguments="gradient_clip_val=null max_epochs=2")
    assert pool(1)(trained, by_hand)[0].told.count(NO_STEP) == 1


def test_steps_that_are_counted_are_not(pool: Pool) -> None:
    assert "no step" not in pool(1)(trained, replace(FIT, arguments="max_epochs=2", steps=18))[0].told
