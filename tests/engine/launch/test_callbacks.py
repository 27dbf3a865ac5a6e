"""Lightning's own callbacks: those that a run serves are beside one another, the others are refused in a line.

What they do to weights and checkpoints under each strategy: strategies/test_module_shapes.py, Averaging and Unfreezing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import OmegaConf

from lightswitch.checkpoints import directory
from lightswitch.hooked_strategy import hooked
from lightswitch.launch.build import trainer_arguments
from lightswitch.strategies import known_callbacks
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.fsdp import FSDP
from tests.engine.conftest import PLAIN, Train
from tests.engine.curves import largest_difference
from tests.engine.plain import PlainData, PlainModel

NAMED = "lightning.pytorch.callbacks"
BESIDE = {  # what each is given, in one run
    "EMAWeightAveraging": "decay=0.9",
    "LambdaCallback": None,
    "OnExceptionCheckpoint": "dirpath=failed",
    **({"RichModelSummary": None} if find_spec("rich") else {}),
    "Timer": "duration=00:00:10:00",
    "TQDMProgressBar": None,
}


def _deepspeed(**options: Any) -> Strategy:
    strategy: Strategy = pytest.importorskip("lightswitch.deepspeed.strategy").DeepSpeed(**options)
    return strategy


OF_PORTABLE = known_callbacks.OF_PORTABLE_CHECKPOINTS
ON_NVME = partial(_deepspeed, stage=3, offload_optimizer=True, offload_optimizer_device="nvme")
UNSERVED = [  # a callback, what does not serve it, what is told of it, and what does serve it
    *((name, FSDP, told, ()) for name, told in known_callbacks.NOWHERE.items()),
    ("EMAWeightAveraging", DDPStrategy, OF_PORTABLE["WeightAveraging"], (Single, FSDP)),
    ("BackboneFinetuning", DDPStrategy, OF_PORTABLE["BaseFinetuning"], (Single, FSDP)),
    ("BackboneFinetuning", ON_NVME, "state that DeepSpeed offloads to NVMe ", (partial(_deepspeed, stage=3),)),
]


@pytest.mark.parametrize(("name", "refusing", "told", "serving"), UNSERVED)
def test_what_a_strategy_can_not_serve_is_told_of_a_class_and_of_those_made_from_it(
    name: str, refusing: Callable[[], Strategy], told: str, serving: Sequence[Callable[[], Strategy]]
) -> None:
    base = getattr(callbacks, name)
    for kind in (base, type("Mine", (base,), {})):
        callback = kind.__new__(kind)
        (line,) = known_callbacks.problems([callback], refusing(), devices=2)
        assert line.startswith(f"{kind.__name__}: {told}")
        assert [*chain(*(known_callbacks.problems([callback], serves(), devices=2) for serves in serving))] == []


def test_callbacks_that_a_run_serves_are_beside_one_another_and_after_a_resume(train: Train) -> None:
    given = [f"callbacks.{name.lower()}._target_={NAMED}.{name}" for name in BESIDE]
    given += [f"callbacks.{name.lower()}.{argument}" for name, argument in BESIDE.items() if argument]
    given += [f"callbacks.often._target_={NAMED}.ModelCheckpoint", "callbacks.often.dirpath=often"]
    given += ["callbacks.often.every_n_train_steps=2", "callbacks.often.save_top_k=-1"]
    run = (*PLAIN, *given, "global_batch_size=40", "run_id=mine")
    begun = train(*run, "trainer.max_steps=4")
    assert sorted(path.name for path in (begun.folder / "often").iterdir()) == [
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
    ]
    other_bar = [f"callbacks.tqdmprogressbar._target_={NAMED}.RichProgressBar"] if find_spec("rich") else []
    resumed = train(*run, *other_bar, "trainer.max_steps=6", folder=begun.folder)
    assert "resumes " in resumed.out
    assert all("loss" not in line for run in (begun, resumed) for line in run.out.splitlines() if "step " in line)


@pytest.mark.parametrize(
    ("typed", "bars", "given"),
    [
        ({}, [], {"enable_progress_bar": False}),
        ({}, [callbacks.TQDMProgressBar()], {}),
        ({"enable_progress_bar": True}, [], {}),  # Lightning's own
    ],
)
def test_a_run_whose_bar_was_removed_has_none(
    typed: dict[str, Any], bars: list[Callback], given: dict[str, Any]
) -> None:
    assert trainer_arguments(bars, OmegaConf.create(typed)) == given


# Sharded, resumed under another strategy, and begun from what they kept

RUN = (
    *PLAIN,
    *("model.lr=1", "trainer.gradient_clip_val=1", "data.batch_size=8", "global_batch_size=40"),
    *("trainer.val_check_interval=2", "trainer.log_every_n_steps=1"),
)
RUN += (f"callbacks.stop._target_={NAMED}.EarlyStopping", "callbacks.stop.monitor=val/loss")
RUN += ("callbacks.stop.min_delta=10", "callbacks.stop.patience=4")  # the first is the best, and none better by ten
RUN += (f"callbacks.top._target_={NAMED}.ModelCheckpoint", "callbacks.top.monitor=val/loss")
RUN += ("callbacks.top.save_top_k=2", "callbacks.top.save_last=link", "callbacks.top.filename='{step}'")
RUN += (f"callbacks.timer._target_={NAMED}.Timer",)
MINE = (*RUN, "run_id=mine", "callbacks.top.dirpath=top", "callbacks.timer.duration=00:01:00:00")
OTHER = (*RUN, "callbacks.top.dirpath=other", "ckpt_path=top/last.ckpt", "trainer.max_steps=30")


@pytest.mark.nightly
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
    short = {"max_steps": 1, "limit_val_batches": 0}
    trainer = Trainer(accelerator="cpu", strategy=hooked(Single()), callbacks=[last, trained], **short, **quiet)
    try:
        trainer.fit(PlainModel(), PlainData())
    finally:
        is_linked.set()
    assert (tmp_path / "new/last.ckpt").is_symlink()
    assert (tmp_path / "new/last.ckpt").resolve() == Path(last.best_model_path).resolve()
    assert (tmp_path / "new/last.ckpt").is_dir()


def _kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
