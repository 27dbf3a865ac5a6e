"""Lightning's own callbacks: those that a run serves are beside one another, the others are refused in a line.

What they do to weights and checkpoints under each strategy: strategies/test_module_shapes.py, Averaging and Unfreezing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from omegaconf import OmegaConf

from lightswitch.hooked_strategy import hooked
from lightswitch.launch.build import trainer_arguments
from lightswitch.strategies.callbacks import NOWHERE, callback_problems
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.ema import EMA
from lightswitch.strategies.fsdp import FSDP
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainData, PlainModel
from tests.runs import largest_difference

NAMED = "lightning.pytorch.callbacks"
BESIDE = {  # what each is given, in one run
    "LambdaCallback": None,
    "OnExceptionCheckpoint": "dirpath=failed",
    **({"RichModelSummary": None} if find_spec("rich") else {}),
    "Timer": "duration=00:00:10:00",
    "TQDMProgressBar": None,
}


def _deepspeed(**options: Any) -> Strategy:
    strategy: Strategy = pytest.importorskip("lightswitch.deepspeed.strategy").DeepSpeed(**options)
    return strategy


UNSERVED = [  # a callback, what does not serve it, what is told of it, and what does serve it
    *((name, FSDP, told, ()) for name, told in NOWHERE.items()),
    ("EMAWeightAveraging", Single, NOWHERE["WeightAveraging"], ()),
    ("BackboneFinetuning", partial(_deepspeed, stage=3), "DeepSpeed trains the parameters that require ", (FSDP,)),
]


@pytest.mark.parametrize(("name", "refusing", "told", "serving"), UNSERVED)
def test_what_a_strategy_can_not_serve_is_told_of_a_class_and_of_those_made_from_it(
    name: str, refusing: Callable[[], Strategy], told: str, serving: Sequence[Callable[[], Strategy]]
) -> None:
    base = getattr(callbacks, name)
    for kind in (base, type("Mine", (base,), {})):
        callback = kind.__new__(kind)
        (line,) = callback_problems([callback], refusing())
        assert line.startswith(f"{kind.__name__}: {told}")
        assert [*chain(*(callback_problems([callback], serves()) for serves in serving))] == []


@pytest.mark.nightly
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


def _kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Averages of weights


AVERAGED = ("callbacks=[default,ema]", "callbacks.ema.decay=0.8")


class MeanFromTheThird(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("average", "of_lightning"),
    [
        (partial(EMA, decay=0.8), partial(EMAWeightAveraging, decay=0.8)),
        (partial(EMA, decay=None, update_starting_at_step=2), MeanFromTheThird),
    ],
    ids=["ema", "mean"],
)
def test_averages_are_those_of_lightnings_own_callback(
    average: Callable[[], Callback], of_lightning: Callable[[], Callback], precision: str
) -> None:
    if of_lightning is MeanFromTheThird and precision == "bf16-true" and torch.__version__ < (2, 9):
        pytest.skip("this torch's own AveragedModel takes no plain mean of weights in 16 bits")
    expected = _fitted(SingleDeviceStrategy("cpu"), [of_lightning()], precision)
    found = _fitted(hooked(Single()), [average()], precision)
    rounded = {"rtol": 0.03, "atol": 1e-3} if precision == "bf16-true" else {}  # Lightning's own are, by validations
    torch.testing.assert_close(found.callback_metrics, expected.callback_metrics, **rounded)
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), **rounded)


def test_averages_of_weights_in_16_bits_have_32_and_are_not_rounded_by_a_validation() -> None:
    looking = _Validated()
    _fitted(hooked(Single()), [looking, EMA(decay=0.999)], "bf16-true")
    for before, within, after in zip(looking.seen[::3], looking.seen[1::3], looking.seen[2::3], strict=True):
        assert {value.dtype for value in before["state_dict"].values()} == {torch.float32}
        assert {value.dtype for value in before["current_model_state"].values()} == {torch.bfloat16}
        assert any(not torch.equal(value, value.bfloat16()) for value in before["state_dict"].values())
        for key in ("state_dict", "current_model_state"):  # the averages, and what is trained
            torch.testing.assert_close([within[key], after[key]], [before[key]] * 2, rtol=0, atol=0)
    assert len(looking.seen) == 6


class _Validated(Callback):
    """What a checkpoint would have of the averages before, within and after each validation."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = trainer._checkpoint_connector.dump_checkpoint()
        self.seen.append(deepcopy({key: saved[key] for key in ("state_dict", "current_model_state")}))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if len(self.seen) % 3 == 1:
            self.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)


def _fitted(strategy: Strategy, callbacks: list[Callback], precision: str) -> Trainer:
    seed_everything(1, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, precision=precision, callbacks=callbacks, max_steps=6,
        val_check_interval=3, num_sanity_val_steps=0, enable_model_summary=False, **quiet,
    )  # fmt: skip
    trainer.fit(PlainModel(), PlainData(batch_size=8))
    return trainer


def test_a_run_with_averages_resumes_with_them_alone(train: Train) -> None:
    run = (*PLAIN, "global_batch_size=40", "strategy=single", "run_id=mine")
    begun = train(*run, *AVERAGED, "trainer.max_steps=2")
    resumed = train(*run, "trainer.max_steps=4", folder=begun.folder, check=False)
    assert resumed.returncode == 2
    assert "error: the model of this checkpoint is an average, beside the trained weights, which" in resumed.err
