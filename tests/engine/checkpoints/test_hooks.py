"""What a module's and a callback's own hooks change is in a checkpoint of their step, once, wherever a run is ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightswitch.checkpoints.directory import read_state
from tests.engine.conftest import PLAIN_DATA, Finished, Train, runs_in
from tests.engine.plain import AveragedModel
from tests.engine.tiny import RECORD

HERE = "tests.engine.checkpoints.test_hooks"
RUN = (
    *(f"model._target_={HERE}.LateModel", f"callbacks.count._target_={HERE}.CountEpochs", PLAIN_DATA, *RECORD),
    *("data.samples=40", "global_batch_size=8", "trainer.val_check_interval=5", "trainer.accelerator=cpu"),
    *("callbacks.last_checkpoint.every_n_steps=1", "callbacks.last_checkpoint.keep=20", "run_id=mine"),
)
END = "trainer.max_steps=13"  # of five steps an epoch


class LateModel(AveragedModel):
    """Averages its weights at a batch's end, counts epochs where they begin and end; asks to be ended if told."""

    def __init__(self, ends_epoch: int | None = None) -> None:
        super().__init__()
        self.ends_epoch = ends_epoch
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.begun += 1

    def on_train_epoch_end(self) -> None:
        self.ended += 1
        if self.current_epoch == self.ends_epoch:
            os.kill(os.getpid(), signal.SIGTERM)


class CountEpochs(pl.Callback):
    def __init__(self) -> None:
        self.ended = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = state_dict["ended"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("uninterrupted"))(*RUN, END)


def test_each_hook_is_counted_once(uninterrupted: Finished) -> None:
    """In mid-epoch a run's end is no epoch's, to whoever goes on from its last checkpoint."""
    saved = uninterrupted.run_dir / "checkpoints/step_13.ckpt"
    assert read_state(saved)["callbacks"]["CountEpochs"] == {"ended": 2}
    weights = torch.load(uninterrupted.run_dir / "weights_0.pt")
    assert (weights["begun"], weights["ended"]) == (3, 3)


@pytest.mark.parametrize("step", [3, 5, 10])
def test_a_run_goes_on_from_any_step_with_what_all_hooks_have_done(
    step: int, uninterrupted: Finished, train: Train
) -> None:
    checkpoint = uninterrupted.run_dir / f"checkpoints/step_{step}.ckpt"
    assert_same(train(*RUN, END, f"resume={checkpoint}"), uninterrupted)


@pytest.mark.parametrize("steps", [5, 8])
def test_a_run_that_was_shorter_goes_on(steps: int, uninterrupted: Finished, train: Train) -> None:
    run = (*RUN, "callbacks.last_checkpoint.every_n_steps=100")
    shorter = train(*run, f"trainer.max_steps={steps}")
    assert_same(train(*run, END, folder=shorter.folder), uninterrupted)


@pytest.mark.parametrize("every_n_steps", [1, 100])
def test_a_run_that_is_preempted_at_an_epochs_end_goes_on(
    every_n_steps: int, uninterrupted: Finished, train: Train
) -> None:
    run = (*RUN, END, f"callbacks.last_checkpoint.every_n_steps={every_n_steps}")
    preempted = train(*run, "model.ends_epoch=0", check=False)
    assert preempted.returncode == 143, preempted.err
    assert_same(train(*run, "model.ends_epoch=null", folder=preempted.folder), uninterrupted)


def assert_same(run: Finished, other: Finished) -> None:
    found, expected = (torch.load(Path(one.run_dir, "weights_0.pt")) for one in (run, other))
    assert found.keys() == expected.keys()
    assert {name for name in found if not torch.equal(found[name], expected[name])} == set()
    states = (read_state(one.run_dir / "checkpoints/last.ckpt") for one in (run, other))
    assert len({state["callbacks"]["CountEpochs"]["ended"] for state in states}) == 1
