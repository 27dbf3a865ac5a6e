"""Lightning's calls of hooks, without the hooks that nobody has overridden.

Lightning calls every hook of every callback, even the empty one of the base class, and before each call it formats a
name and opens a profiler context. A training step makes more than a hundred such calls, of which few do something.
User hooks, which may write to weights, run in a context in which the strategy provides unsharded weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call

from lightswitch import patches
from lightswitch.loop import first_steps
from lightswitch.mixins import callbacks_of
from lightswitch.strategies.weights import WatchedWeights

_call_callbacks, _call_module, _call_strategy = (
    call._call_callback_hooks,
    call._call_lightning_module_hook,
    call._call_strategy_hook,
)
_EMPTY = {  # hooks of a step that do nothing in Lightning's base classes
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end"),
}
_KNOWN = ("lightning", "lightswitch")  # packages whose hooks don't write to weights, or only through the strategy
_WITHOUT_WEIGHTS = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
_OTHERS_WITH_WEIGHTS = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")
_EMPTY_OF_MODULE = {getattr(LightningModule, name) for name in _EMPTY}
_EVALUATION = ("validation_step", "test_step", "predict_step")
_EMPTY_OF_STRATEGY = {Strategy.on_train_batch_start}


def skip_empty_hooks() -> None:
    """Let Lightning skip empty hooks in this process; order and arguments of the others stay the same."""
    patches.replace(call, "_call_callback_hooks", _CallbackHooks())
    patches.replace(call, "_call_lightning_module_hook", _call_lightning_module_hook)
    patches.replace(call, "_call_strategy_hook", _call_strategy_hook)


def is_observed(trainer: Trainer) -> bool:
    """Return whether hook calls are profiled or logged."""
    profiler = trainer.profiler  # type: ignore[attr-defined]  # set by a connector
    passes_through = PassThroughProfiler in type(profiler).__mro__  # for an ABC, isinstance takes longer
    return not passes_through or call.log.isEnabledFor(logging.DEBUG)


class _CallbackHooks:
    """Replacement of Lightning's `_call_callback_hooks` that determines once for each hook which callbacks have it."""

    def __init__(self) -> None:
        self._having: dict[str, _Having] = {}

    def __call__(
        self, trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        module: LightningModule | None = trainer.lightning_module  # None before it is attached
        if module is None:
            _call_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
            return
        callbacks = callbacks_of(trainer)
        having = self._having.get(hook_name)
        if having is None or not having.fits(callbacks):
            having = self._having[hook_name] = _Having(hook_name, callbacks)
        called = having.callbacks
        if monitoring_callbacks is not None:  # Lightning calls these after the others
            called = [one for one in called if isinstance(one, EarlyStopping | Checkpoint) == monitoring_callbacks]
        if is_observed(trainer):
            users = [callback for callback in called if is_users(getattr(callback, hook_name))]
            with _around(trainer, users[0], hook_name) if users else nullcontext():
                _call_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
            return
        known = vars(module)  # bypasses nn.Module's __setattr__, which checks for parameters
        before, known["_current_fx_name"] = known["_current_fx_name"], hook_name
        for callback in called:
            hook = getattr(callback, hook_name)
            if is_users(hook):
                with _around(trainer, callback, hook_name):
                    hook(trainer, module, *args, **kwargs)
            elif callable(hook):
                hook(trainer, module, *args, **kwargs)
        known["_current_fx_name"] = before


class _Having:
    """Callbacks of a Trainer that override a hook of the base class.

    Attributes:
        callbacks: those that override it, in the Trainer's order.
    """

    def __init__(self, hook_name: str, among: list[Callback]) -> None:
        empty = getattr(Callback, hook_name, None)
        self._hook_name, self._among = hook_name, list(among)
        self.callbacks = [
            callback
            for callback in among
            if getattr(type(callback), hook_name, None) is not empty or hook_name in vars(callback)
        ]
        self._others = [vars(callback) for callback in among if callback not in self.callbacks]

    def fits(self, callbacks: list[Callback]) -> bool:
        """Return whether the callbacks are the same, and none of the others has been given the hook since."""
        for own in self._others:  # a loop, as this runs at each call of a hook, and `any` takes twice as long
            if self._hook_name in own:
                return False
        return callbacks == self._among


def _call_lightning_module_hook(
    trainer: Trainer, hook_name: str, *args: Any, pl_module: LightningModule | None = None, **kwargs: Any
) -> Any:
    module: LightningModule | None = pl_module or trainer.lightning_module
    if module is None:
        return _call_module(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    hook = getattr(module, hook_name)
    with _around(trainer, module, hook_name) if is_users(hook) else nullcontext():
        if is_observed(trainer):
            return _call_module(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
        if getattr(hook, "__func__", None) in _EMPTY_OF_MODULE:
            return None
        return _call(hook, module, hook_name, args, kwargs)


def is_users(hook: Any) -> bool:
    """Return whether a hook is code of neither Lightning nor the engine."""
    return callable(hook) and str(getattr(hook, "__module__", "")).partition(".")[0] not in _KNOWN


def _around(trainer: Trainer, owner: Callback | LightningModule, hook_name: str) -> AbstractContextManager[None]:
    """Return a context in which a hook may write to weights; it reports errors of the first steps in one line."""
    strategy, writes = trainer.strategy, hook_name.startswith("on_") or hook_name in _OTHERS_WITH_WEIGHTS
    if not isinstance(strategy, WatchedWeights) or not writes or hook_name in _WITHOUT_WEIGHTS:
        return nullcontext()
    name = type(owner).__name__.removeprefix("FSDP")  # a prefix that fully_shard adds
    whole_weights = strategy.around_hook(f"{hook_name} of {name}")
    steps = getattr(trainer.fit_loop.epoch_loop, "begun", 0)  # an attribute of EpochLoop
    return whole_weights if steps >= first_steps.STEPS else _in_first_steps(whole_weights, trainer, steps)


@contextmanager
def _in_first_steps(whole_weights: AbstractContextManager[None], trainer: Trainer, steps: int) -> Iterator[None]:
    with first_steps.refusing(trainer, steps), whole_weights:
        yield


def _call_strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    with first_steps.refusing_in_evaluation(trainer) if hook_name in _EVALUATION else nullcontext():
        if is_observed(trainer):
            return _call_strategy(trainer, hook_name, *args, **kwargs)
        hook = getattr(trainer.strategy, hook_name)
        if getattr(hook, "__func__", None) in _EMPTY_OF_STRATEGY:
            return None
        return _call(hook, trainer.lightning_module, hook_name, args, kwargs)


def _call(hook: Any, module: LightningModule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook, with its name set in the module, where `self.log` reads it.

    As in Lightning, the name stays set after an error.
    """
    if not callable(hook):
        return None
    known = vars(module)  # bypasses nn.Module's __setattr__, which checks for parameters
    before, known["_current_fx_name"] = known["_current_fx_name"], name
    returned = hook(*args, **kwargs)
    known["_current_fx_name"] = before
    return returned
