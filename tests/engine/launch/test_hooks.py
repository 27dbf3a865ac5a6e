"""Hooks are called in Lightning's order, with Lightning's arguments; those that nobody has are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call

from lightswitch.launch.hooks import skip_empty_hooks
from tests.engine.plain import PlainData, PlainModel

Calls = list[tuple[str, str, str | None, str]]
HOOKS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HOOKS:
        monkeypatch.setattr(call, name, getattr(call, name))


def test_who_has_every_hook_has_the_same_calls_in_the_same_order(tmp_path: Path) -> None:
    expected = _calls(tmp_path)
    assert {name for owner, name, _, _ in expected if owner == "module"} >= {
        *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_after_backward", "optimizer_step"),
        *("configure_gradient_clipping", "on_validation_batch_start", "on_train_epoch_end", "on_fit_end"),
    }
    skip_empty_hooks()
    assert _calls(tmp_path) == expected


def test_a_hook_of_one_object_is_called(tmp_path: Path) -> None:
    skip_empty_hooks()
    callback, model, seen = Callback(), PlainModel(), []
    callback.on_train_batch_end = lambda *_: seen.append("callback")  # type: ignore[method-assign]
    model.on_train_batch_end = lambda *_: seen.append("module")  # type: ignore[method-assign]
    _trainer(tmp_path, [callback], max_steps=2).fit(model, PlainData())
    assert seen == ["callback", "module"] * 2


def test_an_empty_hook_is_not_called_and_one_that_ends_the_epoch_is(tmp_path: Path) -> None:
    class Ending(PlainModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    skip_empty_hooks()
    trainer = _trainer(tmp_path, [], max_epochs=3)
    trainer.fit(Ending(), PlainData())
    assert (trainer.global_step, trainer.current_epoch) == (3, 3)


def test_a_profiler_sees_every_hook(tmp_path: Path) -> None:
    skip_empty_hooks()
    profiler = SimpleProfiler()
    _trainer(tmp_path, [Callback()], max_steps=1, profiler=profiler).fit(PlainModel(), PlainData())
    assert "[Callback]Callback.on_train_batch_start" in profiler.recorded_durations


def _calls(folder: Path) -> Calls:
    """What a module and a callback with every hook are called for, in order: whose, which, what `log` would know."""
    calls: Calls = []
    seed_everything(1, verbose=False)
    module = _with_every_hook(PlainModel, LightningModule, "module", calls)()
    callback = _with_every_hook(Callback, Callback, "callback", calls)()
    trainer = _trainer(folder, [callback], max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, PlainData())
    trainer.test(module, PlainData(), verbose=False)
    return calls


def _with_every_hook(base: type, declared_by: type, owner: str, calls: Calls) -> type:
    names = [name for name in dir(declared_by) if name.startswith(("on_", "optimizer_", "lr_scheduler_"))]
    names = [
        name for name in names if not name.endswith("batch_transfer")
    ]  # the data's, if it is a LightningDataModule
    names += ["configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_optimizers"]
    names += ["setup", "teardown", "training_step", "validation_step", "test_step", "backward"]
    hooks = {name: getattr(base, name) for name in names if callable(getattr(base, name, None))}

    def told(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            module = self if owner == "module" else args[1]
            kinds = " ".join([*(type(value).__name__ for value in args), *sorted(kwargs)])
            calls.append((owner, name, module._current_fx_name, kinds))
            return hook(self, *args, **kwargs)

        return tell

    return type(base.__name__, (base,), {name: told(name, hook) for name, hook in hooks.items()})


def _trainer(folder: Path, callbacks: list[Callback], **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        limit_train_batches=4,
        limit_val_batches=2,
        limit_test_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **arguments,
    )
