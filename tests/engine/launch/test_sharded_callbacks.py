"""Lightning's own callbacks in a run that is sharded, resumed under another strategy, and begun from what they kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightswitch.checkpoints import directory
from lightswitch.hooked_strategy import hooked
from lightswitch.strategies.ddp import Single
from tests.engine.conftest import PLAIN, Train
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
RUN += (f"callbacks.timer._target_={NAMED}.Timer",)
MINE = (*RUN, "run_id=mine", "callbacks.top.dirpath=top", "callbacks.timer.duration=00:01:00:00")
OTHER = (*RUN, "callbacks.top.dirpath=other", "ckpt_path=top/last.ckpt", "trainer.max_steps=30")


def test_they_go_on_under_one_sharded_strategy_after_another(train: Train) -> None:
    alone = train(*MINE, "strategy=single", "trainer.max_steps=30")
    begun = train(*MINE, "strategy=fsdp", "trainer.max_steps=5", ranks=2)
    resumed = train(*MINE, "strategy=deepspeed_stage_3", "trainer.max_steps=30", ranks=2, folder=begun.folder)
    assert max(alone.column("val/loss")) == 9  # the fifth validation, of every two steps
    assert largest_difference(resumed, alone, "val/loss") <= 1e-4
    for run in (alone, resumed):
        best = sorted((loss, step + 1) for step, loss in run.column("val/loss").items())[:2]
        last = max(step for _, step in best)
        assert _kept(run.folder / "top") == {"last.ckpt", *(f"step={step}.ckpt" for _, step in best)}
        assert (run.folder / "top/last.ckpt").resolve().name == f"step={last}.ckpt"

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
        assert is_linked.wait(timeout=300)
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


def _kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
