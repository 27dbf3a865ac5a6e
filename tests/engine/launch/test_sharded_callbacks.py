"""Lightning's own callbacks in a run that is sharded, resumed under another strategy, and begun from what they kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, SpikeDetection

from lightswitch.checkpoints import directory
from lightswitch.checkpoints.directory import read_state
from lightswitch.hooked_strategy import hooked
from lightswitch.strategies.known_callbacks import resume_spikes
from lightswitch.strategies.single import Single
from tests.engine.conftest import PLAIN, Finished, Train
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainData, PlainModel

NAMED = "lightning.pytorch.callbacks"
RUN = (
    *PLAIN,
    "model.lr=1",
    "trainer.gradient_clip_val=1",
    "data.batch_size=8",
    "global_batch_size=40",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=1",
)
RUN += (f"callbacks.stop._target_={NAMED}.EarlyStopping", "callbacks.stop.monitor=val/loss")
RUN += ("callbacks.stop.min_delta=10", "callbacks.stop.patience=4")  # the first is the best, and none better by ten
RUN += (f"callbacks.top._target_={NAMED}.ModelCheckpoint", "callbacks.top.monitor=val/loss")
RUN += ("callbacks.top.save_top_k=2", "callbacks.top.save_last=link", "callbacks.top.filename='{step}'")
RUN += (f"callbacks.timer._target_={NAMED}.Timer", f"callbacks.spikes._target_={NAMED}.SpikeDetection")
RUN += ("callbacks.spikes.rtol=100",)
MINE = (*RUN, "run_id=mine", "callbacks.top.dirpath=top", "callbacks.timer.duration=00:01:00:00")
OTHER = (*RUN, "callbacks.top.dirpath=other", "ckpt_path=top/last.ckpt", "trainer.max_steps=30")


def test_they_go_on_under_one_sharded_strategy_after_another(train: Train) -> None:
    alone = train(*MINE, "strategy=single", "trainer.max_steps=30")
    begun = train(*MINE, "strategy=fsdp", "trainer.max_steps=5", ranks=2)
    losses = _states(begun)["SpikeDetection"]["recent_losses"]
    resumed = train(*MINE, "strategy=deepspeed_stage_3", "trainer.max_steps=30", ranks=2, folder=begun.folder)
    assert max(alone.column("val/loss")) == 9  # the fifth validation, of every two steps
    assert largest_difference(resumed, alone, "val/loss") <= 1e-4
    for run in (alone, resumed):
        best = sorted((loss, step + 1) for step, loss in run.column("val/loss").items())[:2]
        last = max(step for _, step in best)
        assert _kept(run.folder / "top") == {"last.ckpt", *(f"step={step}.ckpt" for _, step in best)}
        assert (run.folder / "top/last.ckpt").resolve().name == f"step={last}.ckpt"
    assert losses == _states(resumed)["SpikeDetection"]["recent_losses"][:5]

    other = train(*OTHER, "strategy=fsdp", "run_id=other", ranks=2, folder=begun.folder)
    assert f"resumes    top/last.ckpt, at step {last}" in other.out
    rest = {step: loss for step, loss in alone.column("train/loss").items() if step >= last}
    assert replace(other, run_id="other").column("train/loss") == pytest.approx(rest, abs=1e-4)
    spent = train(*OTHER, "strategy=single", "callbacks.timer.duration={milliseconds:1}", folder=begun.folder)
    assert f"resumes    top/last.ckpt, at step {last}" in spent.out
    assert "\nstep " not in spent.out


def test_a_checkpoint_that_is_yet_to_be_written_is_linked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, is_linked = directory.write, Event()

    def write_late(*arguments: Any) -> None:
        assert is_linked.wait(timeout=20)
        write(*arguments)

    monkeypatch.setattr(directory, "write", write_late)
    last = ModelCheckpoint(tmp_path / "new", every_n_train_steps=1, save_last="link")
    trained = LambdaCallback(on_train_end=lambda *_: is_linked.set())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        strategy=hooked(Single()),
        callbacks=[last, trained],
        max_steps=1,
        limit_val_batches=0,
        **quiet,
    )
    try:
        trainer.fit(PlainModel(), PlainData())
    finally:
        is_linked.set()
    assert (tmp_path / "new/last.ckpt").is_symlink()
    assert (tmp_path / "new/last.ckpt").resolve() == Path(last.best_model_path).resolve()
    assert (tmp_path / "new/last.ckpt").is_dir()


def test_losses_before_a_resume_are_what_a_spike_is_measured_by() -> None:
    before, after = SpikeDetection(window=3, rtol=5), SpikeDetection(window=3, rtol=2)
    resume_spikes([before, after])
    for loss in (9.0, 4.0, 3.0, 2.0, 1.0):
        before._update_stats(torch.tensor(loss))
    after.load_state_dict(before.state_dict())
    assert (after.last_val, after.rtol) == (1, 2)
    for spikes in (before, after):
        spikes._update_stats(torch.tensor(6.0))
        assert spikes.running_mean.compute() == 3


def test_a_spike_ends_a_run_in_a_line(train: Train) -> None:
    spikes = f"callbacks.spikes._target_={NAMED}.SpikeDetection"
    run = train(*PLAIN, spikes, "callbacks.spikes.rtol=0.1", "model.lr=1", "global_batch_size=40", check=False)
    assert run.returncode == 2
    assert run.err.startswith("error: the loss has a spike by step 2: ")
    assert "Traceback" not in run.err


def _states(run: Finished) -> dict[str, Any]:
    """Return what callbacks have in the last checkpoint."""
    return read_state(run.run_dir / "checkpoints/last.ckpt")["callbacks"]


def _kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
