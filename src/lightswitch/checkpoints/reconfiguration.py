"""What a resumed run's config changes in optimizers, schedules and early stopping, which a checkpoint restores."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightswitch.checkpoints.optimizers import options_of
from lightswitch.checkpoints.safe import safe
from lightswitch.mixins import callbacks_of

log = logging.getLogger(__name__)

_KEY = "configured"  # in a checkpoint's state


class Reconfiguration(Callback):
    """Callback that lets a resumed run's config change optimizers, schedules and the patience of early stopping.

    A checkpoint also has the options that its run began with. An option that is configured otherwise now takes its new
    value. A schedule that is configured otherwise, or whose rate is, goes on as if it had been so from the start; one
    that depends on a metric keeps what it has seen, and the rate changes by the same factor. All else is resumed.
    """

    def __init__(self) -> None:
        self._at_start: dict[str, Any] = {}
        self._is_resumed = False
        self._rates: list[float] = []  # in the checkpoint, of each group of parameters

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before a checkpoint is read
        groups = [[options_of(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        schedules = [
            {"class": type(one).__qualname__, "optimizer": _index(one, trainer), "state": one.state_dict()}
            for one in _schedules(trainer)
        ]
        self._at_start, _ = safe({"groups": groups, "schedules": schedules})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = self._at_start

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = checkpoint.get(_KEY), self._at_start
        if before is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self._is_resumed = True
        saved = (group for optimizer in checkpoint["optimizer_states"] for group in optimizer["param_groups"])
        self._rates = [float(group["lr"]) for group in saved if "lr" in group]
        for callback in callbacks_of(trainer):
            if isinstance(callback, EarlyStopping) and callback.state_key in checkpoint["callbacks"]:
                checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience
        scheduled = {schedule["optimizer"] for schedule in now["schedules"]}
        for index, (optimizer, of_before, of_now) in enumerate(
            zip(checkpoint["optimizer_states"], before["groups"], now["groups"], strict=False)
        ):
            had_schedule = any(schedule["optimizer"] == index for schedule in before["schedules"])
            for group, was, then in zip(optimizer["param_groups"], of_before, of_now, strict=False):
                group.update(regrouped(group, was, then))
                if had_schedule and index not in scheduled:
                    group["lr"] = then["lr"]
        self._reschedule(trainer, checkpoint, before["schedules"])

    def _reschedule(self, trainer: Trainer, checkpoint: dict[str, Any], before: list[dict[str, Any]]) -> None:
        """Replace the saved states of schedules that are configured otherwise than before."""
        found = zip(_schedules(trainer), checkpoint["lr_schedulers"], before, self._at_start["schedules"], strict=False)
        for index, (schedule, state, was, then) in enumerate(found):
            if _equal(was, then):
                continue
            steps = _steps(state)
            if isinstance(schedule, ReduceLROnPlateau) or steps is None:
                checkpoint["lr_schedulers"][index] = changed(state, was["state"], then["state"])
                continue
            replay(schedule, steps)
            checkpoint["lr_schedulers"][index] = schedule.state_dict()
            saved = checkpoint["optimizer_states"][then["optimizer"]]["param_groups"]
            for group, replayed in zip(saved, schedule.optimizer.param_groups, strict=False):
                group.update({key: replayed[key] for key in ("lr", "momentum", "betas") if key in replayed})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the rates of schedules by functions, whose state does not show whether these are others than before."""
        for schedule in _schedules(trainer) if self._is_resumed else ():
            if type(schedule) is LambdaLR:
                groups = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=False)
                for group, rate, factor in groups:
                    group["lr"] = rate * factor(schedule.last_epoch)
        now = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        changes = [pair for pair in zip(self._rates, now, strict=False) if not math.isclose(*pair, rel_tol=1e-6)]
        if self._is_resumed and changes and trainer.is_global_zero:
            log.info(
                "rate       %.3g, and %.3g in the checkpoint: the run's length, schedule or optimizer is another",
                *reversed(changes[0]),
            )
        self._is_resumed = False


def _schedules(trainer: Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _index(schedule: Any, trainer: Trainer) -> int:
    """Return the index of a schedule's optimizer; DeepSpeed's, which wraps it, is the only one."""
    return next((index for index, one in enumerate(trainer.optimizers) if one is schedule.optimizer), 0)


def _steps(state: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a schedule has taken, by its state; None if that does not show it."""
    found: Iterable[Any] = (state, *state.get("_schedulers", ())[:1])
    return next((one["last_epoch"] for one in found if isinstance(one, Mapping) and "last_epoch" in one), None)


def replay(schedule: Any, steps: int) -> None:
    """Step a schedule that has just been made, without its optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not been stepped before
        for _ in range(steps):
            schedule.step()


def regrouped(saved: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's saved options, with those that are configured otherwise than before (see `changed`)."""
    options: dict[str, Any] = changed(saved, before, now)
    rate = "initial_lr" if "initial_lr" in before and "initial_lr" in now else "lr"  # a schedule may begin at zero
    if rate in before and rate in now and "lr" in saved:
        options["lr"] = _scaled(saved["lr"], before[rate], now[rate])
    return options


def changed(saved: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with what is configured otherwise than before.

    Args:
        saved: state in a checkpoint.
        before: state that the run which saved it began with.
        now: state that this run begins with.
    """
    kept = now.keys() & before.keys() - {"_last_lr"}
    return {**saved, **{key: now[key] for key in kept if not _equal(before[key], now[key])}}


def _scaled(saved: Any, before: Any, now: Any) -> Any:
    if _equal(before, now):
        return saved
    return saved * (now / before) if before else now


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)
