"""Lightning's calls of hooks, without the hooks that nobody has overridden; errors of steps, in one line.

Lightning calls every hook of every callback, even the empty one of the base class, and before each call it formats a
name and opens a profiler context. A training step makes more than a hundred such calls, of which few do something.
User hooks, which may write to weights, run in a context in which the strategy provides unsharded weights.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.failures.classify import is_of_another_rank_or_device, raised_in
from lightswitch.hooked_strategy import callbacks_of
from lightswitch.strategies.sharded import first_name

_EMPTY = {  # hooks of a step that do nothing in LightningModule
    name: getattr(LightningModule, name)
    for name in (
        *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end"),
    )
}
_CLIPPING = "configure_gradient_clipping"
_MONITORING = (EarlyStopping, Checkpoint)
_KNOWN = ("lightning", "lightswitch")  # packages whose hooks don't write to weights, or only through the strategy
_WITHOUT_WEIGHTS = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
_OTHERS_WITH_WEIGHTS = ("optimizer_step", "optimizer_zero_grad", _CLIPPING, "lr_scheduler_step")
_EVALUATION = ("validation_step", "test_step", "predict_step")
_NAME = "_current_fx_name"  # attribute of a LightningModule
STEPS = 3  # number of a process's steps that count as its first
_KINDS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, KeyError)
_OTHERS = (torch.OutOfMemoryError, torch.distributed.DistError)  # reported with messages of their own
_SKIPPED = "by returning"  # in Lightning's errors about a step that returns None
_READY_TWICE = "Expected to mark a variable ready only once"  # in torch's error about a gradient
_LIBRARIES = ("torch", "deepspeed", "lightning")


def skip_empty_hooks() -> None:
    """Let Lightning skip empty hooks in this process; order and arguments of the others stay the same."""
    hooks = _Hooks()
    patches.replace(call, "_call_callback_hooks", hooks.call_callbacks)
    patches.replace(call, "_call_lightning_module_hook", hooks.call_module)
    patches.replace(call, "_call_strategy_hook", hooks.call_strategy)


class _Hooks:
    """Replacements of Lightning's functions that call hooks, eighteen times in a step.

    They determine once for a Trainer which callbacks override a hook, and whether calls are profiled. A name that
    `self.log` reads is set in the module's `__dict__`, past nn.Module's `__setattr__`, which checks for parameters. As
    in Lightning, it stays set after an error.
    """

    def __init__(self) -> None:
        self._profiler: Any = None  # of the Trainer, which has one of its own
        self._callbacks: list[Callback] = []
        self._is_profiled = False
        self._overriding: dict[str, list[tuple[Callback, Callable[..., Any], bool]]] = {}

    def call_callbacks(
        self, trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        """Call a hook of the callbacks that override it."""
        module = trainer._accelerator_connector.strategy._lightning_module  # past two properties; None before a fit
        if trainer.profiler is not self._profiler or trainer.callbacks != self._callbacks:  # type: ignore[attr-defined]  # set by connectors
            self._note(trainer)
        if hook_name not in self._overriding:
            self._overriding[hook_name] = self._hooks(hook_name)
        names: dict[str, Any] = {_NAME: None} if module is None else module.__dict__
        before, names[_NAME] = names[_NAME], hook_name
        for callback, hook, is_users in self._overriding[hook_name]:
            if monitoring_callbacks is not None and isinstance(callback, _MONITORING) != monitoring_callbacks:
                continue  # Lightning calls these after the others
            context = self._context(trainer, callback, hook_name) if is_users or self._is_profiled else None
            if context is None:
                hook(trainer, module, *args, **kwargs)
            else:
                with context:
                    hook(trainer, module, *args, **kwargs)
        names[_NAME] = before

    def call_module(
        self, trainer: Trainer, hook_name: str, *args: Any, pl_module: LightningModule | None = None, **kwargs: Any
    ) -> Any:
        """Return the result of a module's hook, or None if it is empty."""
        module: Any = pl_module or trainer._accelerator_connector.strategy._lightning_module
        may_be_empty = hook_name in _EMPTY and hook_name not in module.__dict__
        if may_be_empty and getattr(module.__class__, hook_name) is _EMPTY[hook_name]:
            return None
        if hook_name == _CLIPPING and not self._is_profiled and _clips_as_lightning(module):
            return _clip(trainer, *args, **kwargs)
        hook = getattr(module, hook_name)
        if not callable(hook):
            return None
        return self._run(trainer, module, module, hook, hook_name, args, kwargs, _is_users(hook))

    def call_strategy(self, trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a strategy's hook."""
        strategy, is_guarded = trainer._accelerator_connector.strategy, hook_name in _EVALUATION
        module, hook = strategy._lightning_module, getattr(strategy, hook_name)
        return self._run(trainer, module, strategy, hook, hook_name, args, kwargs, is_guarded)

    def _run(
        self,
        trainer: Trainer,
        module: Any,
        owner: Any,
        hook: Callable[..., Any],
        hook_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_guarded: bool,
    ) -> Any:
        if trainer.profiler is not self._profiler:  # type: ignore[attr-defined]  # set by a connector
            self._note(trainer)
        names = module.__dict__
        before, names[_NAME] = names[_NAME], hook_name
        context = self._context(trainer, owner, hook_name) if is_guarded or self._is_profiled else None
        if context is None:
            returned = hook(*args, **kwargs)
        else:
            with context:
                returned = hook(*args, **kwargs)
        names[_NAME] = before
        return returned

    def _note(self, trainer: Trainer) -> None:
        self._profiler = trainer.profiler  # type: ignore[attr-defined]  # set by a connector
        self._is_profiled = not isinstance(self._profiler, PassThroughProfiler)
        self._callbacks, self._overriding = [*callbacks_of(trainer)], {}

    def _hooks(self, hook_name: str) -> list[tuple[Callback, Callable[..., Any], bool]]:
        """Return the callbacks that override a hook, their hooks, and whether these are the user's code."""
        empty = getattr(Callback, hook_name, None)
        return [
            (callback, hook := getattr(callback, hook_name), _is_users(hook))
            for callback in self._callbacks
            if getattr(type(callback), hook_name, None) is not empty or hook_name in vars(callback)
        ]

    def _context(self, trainer: Trainer, owner: Any, hook_name: str) -> AbstractContextManager[Any] | None:
        """Return the context in which a hook runs, which may be the profiler's; None for none."""
        around = _around(trainer, owner, hook_name)
        if not self._is_profiled:
            return around
        kind = next(kind for kind in (Callback, LightningModule, Strategy) if isinstance(owner, kind))
        entered = ExitStack()
        entered.enter_context(self._profiler.profile(f"[{kind.__name__}]{type(owner).__name__}.{hook_name}"))
        if around is not None:
            entered.enter_context(around)
        return entered


def _clips_as_lightning(module: LightningModule) -> bool:
    """Return whether a module clips gradients by Lightning's implementation, with the Trainer's arguments."""
    kind, own = type(module), vars(module)
    return (
        kind.configure_gradient_clipping is LightningModule.configure_gradient_clipping
        and kind.clip_gradients is LightningModule.clip_gradients
        and not (_CLIPPING in own or "clip_gradients" in own)
    )


def _clip(trainer: Trainer, optimizer: Any, gradient_clip_val: float | None, gradient_clip_algorithm: Any) -> None:
    """Clip gradients as LightningModule.clip_gradients does, which first compares the Trainer's arguments with
    themselves."""
    plugin, kind = trainer.precision_plugin, gradient_clip_algorithm or GradClipAlgorithmType.NORM
    if not gradient_clip_val:
        return
    if kind is GradClipAlgorithmType.NORM and type(plugin).clip_gradients is Precision.clip_gradients:
        plugin.clip_grad_by_norm(optimizer, gradient_clip_val)
    else:
        plugin.clip_gradients(optimizer, gradient_clip_val, kind)


def _is_users(hook: Any) -> bool:
    """Return whether a hook is code of neither Lightning nor the engine."""
    return not _is_known(getattr(hook, "__module__", ""))


@cache
def _is_known(module: object) -> bool:
    return _package(module) in _KNOWN


def _around(trainer: Trainer, owner: Any, hook_name: str) -> AbstractContextManager[None] | None:
    """Return a context in which a hook may write to weights, and errors of the first steps are reported in one line.

    None if the strategy has no copies of weights, or the hook writes to none.
    """
    if hook_name in _EVALUATION:
        loop: Any = trainer._active_loop  # whose first batches count as first steps
        return refusing(trainer, loop.batch_progress.current.ready - 1)
    around_hook = getattr(trainer.strategy, "around_hook", None)  # of WatchedWeights
    writes = hook_name.startswith("on_") or hook_name in _OTHERS_WITH_WEIGHTS
    if around_hook is None or not writes or hook_name in _WITHOUT_WEIGHTS or not _is_users(getattr(owner, hook_name)):
        return None
    name = type(owner).__name__.removeprefix("FSDP")  # a prefix that fully_shard adds
    whole_weights: AbstractContextManager[None] = around_hook(f"{hook_name} of {name}")
    steps = getattr(trainer.fit_loop.epoch_loop, "begun", 0)  # an attribute of EpochLoop
    return whole_weights if steps >= STEPS else refusing(trainer, steps, whole_weights)


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
        if (line := refusal(error, trainer, steps)) is not None:
            raise line from error
        raise


def refusal(error: Exception, trainer: Trainer, steps: int) -> Refused | None:
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
    is_ddp = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
    if is_ddp and _READY_TWICE in str(error):
        return _told(
            error,
            f"the backward pass of {name} computes gradients several times, as reentrant checkpoints do, and DDP "
            "expects each once; call torch.utils.checkpoint.checkpoint with use_reentrant=False",
        )
    is_whole = is_ddp or isinstance(trainer.strategy, SingleDeviceStrategy)
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
