"""Hooks are called in Lightning's order, with Lightning's arguments; those that nobody has are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch import Tensor

from lightswitch.loop.hooks import skip_empty_hooks
from lightswitch.loop.loops import replace_loops
from tests.engine.launch import hooked
from tests.engine.launch.hooked import Logging, Shown, trained_by
from tests.engine.plain import PlainData, PlainModel

HOOKS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
FITS = {  # a run, and hooks of it that must be among those compared
    "accumulation": (
        PlainModel,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"optimizer_step", "on_before_zero_grad", "on_after_backward", "configure_gradient_clipping"},
    ),
    "validation between batches": (
        hooked.Logging,
        {"val_check_interval": 2, "log_every_n_steps": 1},
        {"on_validation_batch_start", "on_validation_model_zero_grad", "on_train_epoch_end"},
    ),
    "a step without the index": (hooked.WithoutIndex, {}, {"training_step"}),
    "two optimizers by hand": (hooked.TwoOptimizers, {"val_check_interval": 2}, {"backward"}),
    "an epoch that a hook ends": (hooked.EndingEpochs, {"log_every_n_steps": 1}, {"on_train_batch_start"}),
    "a step that takes the loader's iterator": (hooked.TakingTheIterator, {}, {"training_step"}),
    "a batch that is skipped": (hooked.Skipping, {}, {"optimizer_step"}),
    "an error": (hooked.Failing, {}, {"on_train_batch_start"}),
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HOOKS:
        monkeypatch.setattr(call, name, getattr(call, name))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:(You are using the|Found) `dataloader_iter`")
@pytest.mark.parametrize(("model", "arguments", "compared"), FITS.values(), ids=FITS)
def test_who_has_every_hook_has_the_same_calls_in_the_same_order(
    model: type[PlainModel], arguments: dict[str, Any], compared: set[str], tmp_path: Path
) -> None:
    expected = hooked.calls(model, tmp_path, lambda trainer: None, **arguments)
    assert {name for owner, name, _, _ in expected if owner == "module"} >= compared
    assert {("data", "transfer_batch_to_device"), ("callback", "on_train_batch_start")} <= {
        told[:2] for told in expected
    }
    assert (("callback", "on_exception") in {told[:2] for told in expected}) == (model is hooked.Failing)
    assert hooked.calls(model, tmp_path, _as_the_engine, **arguments) == expected


def test_a_hook_of_one_object_is_called(tmp_path: Path) -> None:
    skip_empty_hooks()
    callback, model, seen = Callback(), PlainModel(), []
    callback.on_train_batch_end = lambda *_: seen.append("callback")  # type: ignore[method-assign]
    model.on_train_batch_end = lambda *_: seen.append("module")  # type: ignore[method-assign]
    trained_by(tmp_path, [callback], max_steps=2).fit(model, PlainData())
    assert seen == ["callback", "module"] * 2


def test_a_profiler_sees_every_hook_that_does_something(tmp_path: Path) -> None:
    skip_empty_hooks()
    profiler = SimpleProfiler()
    trained_by(tmp_path, [Shown()], max_steps=1, profiler=profiler).fit(PlainModel(), PlainData())
    seen = {"[Callback]Shown.on_train_batch_end", "[LightningModule]PlainModel.optimizer_step"}
    assert seen | {"[Strategy]SingleDeviceStrategy.training_step"} <= profiler.recorded_durations.keys()


def _as_the_engine(trainer: Trainer) -> None:
    skip_empty_hooks()
    replace_loops(trainer)


# The loop over batches shows and computes what Lightning's does


def test_what_is_logged_is_shown_at_the_same_steps(tmp_path: Path) -> None:
    expected = _shown(tmp_path, lambda trainer: None)
    assert {"train/loss", "train/both_step", "train/both_epoch", "train/mean"} <= expected[-1]["callback"].keys()
    assert _shown(tmp_path, replace_loops) == expected


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_are_the_same_to_the_bit(accumulation: int, tmp_path: Path) -> None:
    expected = _weights(tmp_path, lambda trainer: None, accumulate_grad_batches=accumulation)
    trained = _weights(tmp_path, replace_loops, accumulate_grad_batches=accumulation)
    torch.testing.assert_close(trained, expected, rtol=0, atol=0)


@pytest.mark.parametrize("clipping", [{"gradient_clip_algorithm": "value"}, {"gradient_clip_algorithm": "norm"}, {}])
def test_gradients_are_clipped_as_lightning_clips_them(clipping: dict[str, str], tmp_path: Path) -> None:
    clipping = {"gradient_clip_val": 0.01, **clipping}
    expected = _weights(tmp_path, lambda trainer: None, **clipping)
    torch.testing.assert_close(_weights(tmp_path, _as_the_engine, **clipping), expected, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(_weights(tmp_path, _as_the_engine), expected)


@pytest.mark.parametrize("hook", ["configure_gradient_clipping", "clip_gradients"])
@pytest.mark.parametrize("is_of_class", [True, False])
def test_a_module_that_clips_its_gradients_itself_is_asked(hook: str, is_of_class: bool, tmp_path: Path) -> None:
    skip_empty_hooks()
    asked: list[Any] = []
    model = type("Clipping", (PlainModel,), {hook: lambda self, *given, **named: asked.append((given, named))})()
    if not is_of_class:
        model, own = PlainModel(), model
        setattr(model, hook, getattr(own, hook))
    trained_by(tmp_path, [], max_steps=2, gradient_clip_val=0.5).fit(model, PlainData())
    assert len(asked) == 2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # which Lightning says once a process
def test_a_step_that_is_replaced_between_epochs_gets_the_arguments_it_takes(tmp_path: Path) -> None:
    class Replacing(PlainModel):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.training_step = lambda batch: self.took.append(batch)  # type: ignore[method-assign]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.took: list[Any] = []
            return super().training_step(batch, batch_idx)

    model, trainer = Replacing(), trained_by(tmp_path, [], max_epochs=2, limit_val_batches=0)
    replace_loops(trainer)
    trainer.fit(model, PlainData())
    assert len(model.took) == 4


def _weights(folder: Path, arrange: Callable[[Trainer], None], **arguments: Any) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    model, trainer = PlainModel(), trained_by(folder, [], max_epochs=2, **arguments)
    arrange(trainer)
    trainer.fit(model, PlainData())
    return model.state_dict()


def _shown(folder: Path, arrange: Callable[[Trainer], None]) -> list[dict[str, dict[str, float]]]:
    seed_everything(1, verbose=False)
    shown = Shown()
    trainer = trained_by(folder, [shown], max_epochs=2, val_check_interval=3)
    arrange(trainer)
    trainer.fit(Logging(), PlainData())
    return shown.seen
