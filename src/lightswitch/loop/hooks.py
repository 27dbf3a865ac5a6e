"""Lightning's calls of hooks, without the hooks that nobody has overridden.

Lightning calls every hook of every callback, even the empty one of the base class, and before each call it formats a
name and opens a profiler context. A training step makes more than a hundred such calls, of which few do something.
User hooks, which may write to weights, run in a context in which the strategy provides unsharded weights.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call

from lightswitch import patches
from lightswitch.errors import NeedsValues, Refused
from lightswitch.failures.classify import is_of_another_rank_or_device, raised_in
from lightswitch.mixins import callbacks_of
from lightswitch.strategies.sharded import first_name
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
STEPS = 3  # number of a process's steps that count as its first
_KINDS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, KeyError)
_OTHERS = (torch.OutOfMemoryError, torch.distributed.DistError, NeedsValues)  # reported with messages of their own
_SKIPPED = "by returning"  # in Lightning's errors about a step that returns None
_READY_TWICE = "Expected to mark a variable ready only once"  # in torch's error about a gradient
_LIBRARIES = ("torch", "deepspeed", "lightning")


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
            users = [callback for callback in called if callback in having.users]
            with _around(trainer, users[0], hook_name) if users else nullcontext():
                _call_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
            return
        known = vars(module)  # bypasses nn.Module's __setattr__, which checks for parameters
        before, known["_current_fx_name"] = known["_current_fx_name"], hook_name
        for callback in called:
            hook = getattr(callback, hook_name)
            if callback in having.users:
                with _around(trainer, callback, hook_name):
                    hook(trainer, module, *args, **kwargs)
            else:
                hook(trainer, module, *args, **kwargs)
        known["_current_fx_name"] = before


class _Having:
    """Callbacks of a Trainer that override a hook of the base class.

    Attributes:
        callbacks: those that override it, in the Trainer's order.
        users: those of them whose hook is code of neither Lightning nor the engine.
    """

    def __init__(self, hook_name: str, among: list[Callback]) -> None:
        empty = getattr(Callback, hook_name, None)
        self._hook_name, self._among = hook_name, list(among)
        self.callbacks = [
            callback
            for callback in among
            if getattr(type(callback), hook_name, None) is not empty or hook_name in vars(callback)
        ]
        self.users = [callback for callback in self.callbacks if is_users(getattr(callback, hook_name))]
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
    return not _is_known(getattr(hook, "__module__", ""))


@cache
def _is_known(module: object) -> bool:
    return str(module).partition(".")[0] in _KNOWN


def _around(trainer: Trainer, owner: Callback | LightningModule, hook_name: str) -> AbstractContextManager[None]:
    """Return a context in which a hook may write to weights; it reports errors of the first steps in one line."""
    strategy, writes = trainer.strategy, hook_name.startswith("on_") or hook_name in _OTHERS_WITH_WEIGHTS
    if not isinstance(strategy, WatchedWeights) or not writes or hook_name in _WITHOUT_WEIGHTS:
        return nullcontext()
    name = type(owner).__name__.removeprefix("FSDP")  # a prefix that fully_shard adds
    whole_weights = strategy.around_hook(f"{hook_name} of {name}")
    steps = getattr(trainer.fit_loop.epoch_loop, "begun", 0)  # an attribute of EpochLoop
    return whole_weights if steps >= STEPS else refusing(trainer, steps, whole_weights)


def _call_strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    loop: Any = trainer._active_loop if hook_name in _EVALUATION else None  # whose first batches count as first steps
    with nullcontext() if loop is None else refusing(trainer, loop.batch_progress.current.ready - 1):
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


@contextmanager
def refusing(trainer: Trainer, steps: int, within: AbstractContextManager[None] | None = None) -> Iterator[None]:
    """Context manager around a module's step or hook that reports errors caused by the strategy in one line.

    Args:
        steps: the number of steps that this process has made before.
        within: another context to enter; None for none.

    Raises:
        Refused: the strategy has caused an error.
    """
    try:
        with within or nullcontext():
            yield
    except Exception as error:
        if (line := _refused(error, trainer, steps)) is not None:
            raise line from error
        raise


def _refused(error: Exception, trainer: Trainer, steps: int) -> Refused | None:
    """Return the refusal for an error of a step; None if the strategy is not the cause.

    The strategy is not the cause if it keeps parameters whole, after the first steps, if the error tells of another
    rank or of the device, or if code outside of torch, DeepSpeed and Lightning raises it by a `raise` statement. A
    `training_step` that returns None in automatic optimization is refused in any case.
    """
    name = first_name(trainer.lightning_module)
    if _SKIPPED in str(error) and isinstance(error, RuntimeError | MisconfigurationException):
        return _told(
            error,
            f"{name}.training_step returns None in automatic optimization, but all devices have to train on each "
            "batch; return a loss (to skip a batch, 0 times its loss), or set self.automatic_optimization = False if "
            "it steps manually",
        )
    if _is_of_reentrant_checkpoint(error) and trainer.world_size > 1:
        is_ddp = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
        return _told(
            error,
            f"the backward pass of {name} computes gradients several times, as reentrant checkpoints do, and "
            f"{type(trainer.strategy).__name__} expects each once; call torch.utils.checkpoint.checkpoint with "
            "use_reentrant=False" + (", or type trainer.strategy.static_graph=true" if is_ddp else ""),
        )
    is_whole = isinstance(trainer.strategy, SingleDeviceStrategy) or (
        isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
    )
    if is_whole or steps >= STEPS or not isinstance(error, _KINDS) or isinstance(error, _OTHERS):
        return None
    if is_of_another_rank_or_device(error):  # a killed rank must not be told as what a strategy can't do
        return None
    frame = raised_in(error)
    if frame is not None and _package(frame.f_globals.get("__name__")) not in _LIBRARIES:
        return None
    message = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
    gathers_parts = getattr(trainer.strategy, "gather", None) == "parts"  # of fsdp
    return _told(
        error,
        f"{name} fails in its first steps under {type(trainer.strategy).__name__}, which shards parameters over "
        f"devices{_place(error)}: {message}; {'type trainer.strategy.gather=step, or ' if gathers_parts else ''}"
        "use strategy=ddp, which does not shard them. If it also fails there, the "
        "error is in the module. The traceback is in train.log",
    )


def _is_of_reentrant_checkpoint(error: Exception) -> bool:
    """Return whether a backward pass within another has failed, which `use_reentrant=True` starts for each block."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames}
    return _READY_TWICE in str(error) or (
        isinstance(error, RuntimeError | AssertionError)
        and ("torch.utils.checkpoint", "backward") in places
        and _package(frames[-1].f_globals.get("__name__")) in _LIBRARIES
        and not is_of_another_rank_or_device(error)
        and not isinstance(error, _OTHERS)
    )


def _told(error: Exception, line: str) -> Refused:
    refusal = Refused(line)
    refusal.details = "".join(traceback.format_exception(error))
    return refusal


def _place(error: Exception) -> str:
    """Return the function and line of the innermost frame outside of libraries, as text."""
    frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [at for at in frames if _package(at[0].f_globals.get("__name__")) not in (*_LIBRARIES, "lightswitch")]
    if not own:
        return ""
    frame, number = own[-1]
    return f", in {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]}:{number})"


def _package(module: object) -> str:
    return str(module).partition(".")[0]
