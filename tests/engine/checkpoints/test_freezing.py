"""Layers that a hook, a step or a callback freezes and unfreezes, through a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints.finetuning import TrainableOnly, follow_strategy
from lightswitch.checkpoints.last import LastCheckpoints, StepBoundary
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import Refused
from lightswitch.loop.loops import replace_loops
from lightswitch.strategies.callbacks import StrategyCallback
from tests.engine.fits import local_trainer


class ChangesOnce(pl.LightningModule):
    """Unfreezes its backbone in the second step, and freezes its head in the step ``last_of_head``."""

    def __init__(self, last_of_head: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last_of_head = last_of_head
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.backbone.requires_grad_(True)
        if self.global_step == self.last_of_head:
            self.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 4), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters() if self.last_of_head == -2 else self.parameters(), lr=0.1)


class Scheduled(ChangesOnce):
    def __init__(self, schedule: Any) -> None:
        super().__init__(last_of_head=-2)
        self.schedule = schedule

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [self.schedule(optimizer)]


def test_what_was_unfrozen_once_is_trained_after_a_resume(tmp_path: Path) -> None:
    expected = _fitted(ChangesOnce(), tmp_path, steps=4)
    resumed = _fitted(ChangesOnce(), tmp_path, steps=4, resumed=tmp_path / "step_2.ckpt")
    assert torch.equal(resumed.backbone.weight, expected.backbone.weight)


def test_a_resumed_run_may_freeze_what_the_run_before_trained(tmp_path: Path) -> None:
    before = _fitted(ChangesOnce(), tmp_path, steps=2)
    module = ChangesOnce()
    module.head.requires_grad_(False)
    resumed = _fitted(module, tmp_path, steps=4, resumed=tmp_path / "step_2.ckpt")
    assert torch.equal(resumed.head.weight, before.head.weight)
    assert not torch.equal(resumed.backbone.weight, before.backbone.weight)


def test_a_loss_of_nothing_that_is_trained_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^the loss of step 2 depends on no trainable parameter: .*"):
        _fitted(ChangesOnce(last_of_head=2), tmp_path, steps=4)


def _by_steps(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def _in_turn(optimizer: Any) -> SequentialLR:
    return SequentialLR(optimizer, [_by_steps(optimizer), CosineAnnealingLR(optimizer, 4)], [2])


@pytest.mark.parametrize("schedule", [_by_steps, _in_turn])
def test_a_schedule_with_a_rate_for_each_group_is_refused_where_groups_are_added(schedule: Any, tmp_path: Path) -> None:
    with pytest.raises(
        Refused, match="LambdaLR has one learning rate for each initial parameter group of the optimizer, but B"
    ):
        _fitted(Scheduled(schedule), tmp_path, 1, callbacks=[BackboneFinetuning(9)])  # before it adds one


def test_another_schedule_goes_on_where_groups_are_added(tmp_path: Path) -> None:
    module = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 9))
    trained = _fitted(module, tmp_path, 4, callbacks=[BackboneFinetuning(1, verbose=False)])
    assert not torch.equal(trained.backbone.weight, ChangesOnce().backbone.weight)


def _fitted(
    module: ChangesOnce,
    folder: Path,
    steps: int,
    resumed: Path | None = None,
    callbacks: list[pl.Callback] | None = None,
) -> ChangesOnce:
    engine = [StrategyCallback(), GlobalBatch(BatchPlan.derive(1, 1, 1), seed=3), StepBoundary()]
    saves = LastCheckpoints(str(folder), every_n_steps=2)
    trainer = local_trainer(folder, *engine, *(callbacks or ()), saves, max_steps=steps)
    replace_loops(trainer)
    trainer.fit(module, ckpt_path=resumed)
    return module


class FrozenAfterwards(ChangesOnce):
    """Trains its head in the first step alone, another layer in each, and its backbone in none."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(self.global_step == 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.more(self.head(self.backbone(batch))).square().mean()


def test_what_was_trained_and_is_frozen_since_is_saved_also_by_a_resumed_run(tmp_path: Path) -> None:
    trained = _fitted(FrozenAfterwards(), tmp_path, 2, callbacks=[TrainableOnly()])
    saved = tmp_path / "step_2.ckpt"
    resumed = _fitted(FrozenAfterwards(), tmp_path, 4, resumed=saved, callbacks=[TrainableOnly()])
    for path in (saved, tmp_path / "step_4.ckpt"):
        assert {name.split(".")[0] for name in Reader(path, None).names("model.")} == {"head", "more"}
    assert torch.equal(resumed.head.weight, trained.head.weight)


# What Lightning's BaseFinetuning adds to an optimizer. Runs with it: strategies/test_module_shapes.py, Unfreezing


def test_a_layer_that_begins_as_another_is_unfrozen_and_none_is_added_twice() -> None:
    head, backbone = nn.LayerNorm(2), nn.LayerNorm(2)
    optimizer = SGD(head.parameters(), lr=0.1)
    callback = BackboneFinetuning()
    follow_strategy([callback])
    for _ in range(2):
        callback.unfreeze_and_add_param_group([head, backbone], optimizer)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, layer.parameters())) for layer in (head, backbone)
    ]
