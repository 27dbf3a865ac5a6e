"""Hooks are called in Lightning's order, with Lightning's arguments; those that nobody has are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call

from lightswitch.loop.hooks import skip_empty_hooks
from lightswitch.loop.loops import replace_loops
from tests.engine.launch import hooked
from tests.engine.launch.hooked import trained_by
from tests.engine.plain import PlainData, PlainModel

HOOKS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
RUNS = {  # a run, and hooks of it that must be among those compared
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
@pytest.mark.parametrize(("model", "arguments", "compared"), RUNS.values(), ids=RUNS)
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


def test_an_empty_hook_is_not_called_and_one_that_ends_the_epoch_is(tmp_path: Path) -> None:
    class Ending(PlainModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    skip_empty_hooks()
    trainer = trained_by(tmp_path, [], max_epochs=3)
    trainer.fit(Ending(), PlainData())
    assert (trainer.global_step, trainer.current_epoch) == (3, 3)


def test_a_profiler_sees_every_hook(tmp_path: Path) -> None:
    skip_empty_hooks()
    profiler = SimpleProfiler()
    trained_by(tmp_path, [Callback()], max_steps=1, profiler=profiler).fit(PlainModel(), PlainData())
    assert "[Callback]Callback.on_train_batch_start" in profiler.recorded_durations


def _as_the_engine(trainer: Trainer) -> None:
    skip_empty_hooks()
    replace_loops(trainer)
