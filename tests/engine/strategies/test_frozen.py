"""Layers that are frozen while a step is under way."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.engine.conftest import PLAIN_DATA, Train
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainModel
from tests.engine.tiny import NO_CHECKPOINTS

pytest.importorskip("deepspeed")

SHORT = (PLAIN_DATA, *NO_CHECKPOINTS, "global_batch_size=24", "trainer.max_steps=4", "trainer.log_every_n_steps=1")
MID_STEP = (*SHORT, f"model._target_={__name__}.FrozenInMidStep", "micro_batch_size=6")


class FrozenInMidStep(PlainModel):
    """Freezes a layer for the second half of each step's micro batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        count = self.trainer.accumulate_grad_batches
        self.net[0].requires_grad_(batch_idx % count < count / 2)


class FrozenInStep(PlainModel):
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(self.global_step < 2)
        return super().training_step(batch, batch_idx)


def test_gradients_of_what_is_frozen_in_mid_step_are_averaged(train: Train) -> None:
    alone = train(*MID_STEP, "strategy=single")
    for strategy in ("ddp", "fsdp"):
        assert largest_difference(train(*MID_STEP, f"strategy={strategy}", ranks=2), alone) <= 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1", "deepspeed_stage_1"])
def test_what_is_frozen_in_training_step_is_told(strategy: str, train: Train) -> None:
    model = f"model._target_={__name__}.FrozenInStep"
    run = train(*SHORT, model, f"strategy={strategy}", ranks=1, check=False)
    assert run.returncode == 2
    assert "Traceback" not in run.err
    assert (
        "error: requires_grad of net.0.weight, net.0.bias is set within step 2, for which gradients are already laid "
        "out; set it in on_train_batch_start, at the step's first batch\n"
    ) in run.err
