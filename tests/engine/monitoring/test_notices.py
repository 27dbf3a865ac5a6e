"""What a run says of its model, once hooks have built it, and of an epoch of batches in which no step is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightswitch.monitoring.notices import ModelSize, StepsAreCounted
from tests.engine.conftest import PLAIN as PLAIN_RUN
from tests.engine.conftest import Train
from tests.engine.fits import PLAIN, trained
from tests.engine.monitoring.tiny import Regression, loader, trainer
from tests.engine.plain import ManualModel, PlainModel
from tests.pool import Pool


class BuiltInSetup(Regression):
    """As Lightning's documentation has it, where the data tell a size; a lazy layer is asked for it."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 1))  # of another size than before
        self.net(next(iter(loader()))[0])


class BuiltTwice(BuiltInSetup):
    def configure_model(self) -> None:
        self.net = nn.Sequential(self.net, nn.Linear(1, 1))


@pytest.mark.parametrize(("model", "parameters"), [(Regression, 49), (BuiltInSetup, 31), (BuiltTwice, 33)])
def test_a_model_is_counted_when_its_hooks_have_built_it(
    model: type[Regression], parameters: int, tmp_path: Path
) -> None:
    size = ModelSize()
    trainer(tmp_path, callbacks=[size], max_steps=1).fit(model(), loader(), loader())
    assert size.counts == {"parameters": parameters, "trained_parameters": parameters}


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
NO_STEP = "no step    in an epoch of 9 batches, no optimizer step was counted"


def test_steps_that_are_not_counted_are_told_after_the_first_epoch_and_others_not(pool: Pool) -> None:
    assert "no step" not in pool(1)(trained, replace(FIT, arguments="max_epochs=2", steps=18))[0].told
    by_hand = replace(FIT, module=PastLightning, arguments="gradient_clip_val=null max_epochs=2")
    assert pool(1)(trained, by_hand)[0].told.count(NO_STEP) == 1


class FailsAfterTheLastStep(pl.Callback):
    """Fails once, where an epoch ends whose steps are all in a checkpoint."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("a passing fault")


def test_a_start_that_only_ends_an_epoch_is_not(train: Train) -> None:
    fails = "callbacks.fails._target_=tests.engine.monitoring.test_notices.FailsAfterTheLastStep"
    short = ("trainer.max_epochs=1", "trainer.limit_train_batches=3", "callbacks.last_checkpoint.every_n_steps=3")
    words = (*PLAIN_RUN, fails, *short, "run_id=mine")
    failed = train(*words, check=False)
    resumed = train(*words, folder=failed.folder)
    assert failed.returncode == 1
    assert "resumes    runs/plainmodel/mine/checkpoints/step_3.ckpt, at step 3" in resumed.out
    assert "no step" not in resumed.out + resumed.err
