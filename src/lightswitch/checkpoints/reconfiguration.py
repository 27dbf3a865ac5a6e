"""What a resumed run's config changes in optimizers, schedules and early stopping, which a checkpoint restores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

from lightswitch.checkpoints.optimizers import options_of
from lightswitch.checkpoints.safe import safe
from lightswitch.mixins import callbacks_of

_KEY = "configured"  # in a checkpoint's state
_RATES, _LAST_RATES = "base_lrs", "_last_lr"  # in a schedule's state, one for each group of parameters


class Reconfiguration(Callback):
    """Callback that lets a resumed run's config change optimizers, schedules and the patience of early stopping.

    A checkpoint also has the options that its run began with. What is configured otherwise now takes the new value, the
    learning rate changes by the same factor, and all else is resumed.
    """

    def __init__(self) -> None:
        self._at_start: dict[str, Any] = {}
        self._rescheduled: list[int] = []  # indices of schedules that have other options than before

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before a checkpoint is read
        schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        groups = [[options_of(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._at_start, _ = safe({"groups": groups, "schedules": schedules})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = self._at_start

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = checkpoint.get(_KEY), self._at_start
        if before is None or trainer.state.fn != TrainerFn.FITTING:
            return
        for callback in callbacks_of(trainer):
            if isinstance(callback, EarlyStopping) and callback.state_key in checkpoint["callbacks"]:
                checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience
        for saved, *configured in zip(checkpoint["optimizer_states"], before["groups"], now["groups"], strict=False):
            for group, was, then in zip(saved["param_groups"], *configured, strict=False):
                group.update(regrouped(group, was, then))
        states = zip(checkpoint["lr_schedulers"], before["schedules"], now["schedules"], strict=False)
        for index, (state, was, then) in enumerate(states):
            state.update(changed(state, was, then))
            if any(
                not _equal(was[key], value)
                for key, value in then.items()
                if key in was and key not in (_RATES, _LAST_RATES)
            ):
                self._rescheduled.append(index)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the rates of schedules that have other options: some compute a rate from the last one."""
        for index in self._rescheduled:
            schedule = trainer.lr_scheduler_configs[index].scheduler
            rates: list[float] = getattr(schedule, "_get_closed_form_lr", lambda: [])()
            for group, rate in zip(schedule.optimizer.param_groups, rates, strict=False):
                group["lr"] = rate
        self._rescheduled = []


def regrouped(saved: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's saved options, with those that are configured otherwise than before (see `changed`)."""
    options: dict[str, Any] = changed(saved, before, now)
    rate = "initial_lr" if "initial_lr" in before and "initial_lr" in now else "lr"  # a schedule may begin at zero
    if rate in before and rate in now and "lr" in saved:
        options["lr"] = _scaled(saved["lr"], before[rate], now[rate])
    return options


def changed(saved: Any, before: Any, now: Any) -> Any:
    """Return a saved state with what is configured otherwise than before.

    Args:
        saved: state in a checkpoint.
        before: state that the run which saved it began with.
        now: state that this run begins with.
    """
    if _equal(before, now):
        return saved
    values = (saved, before, now)
    if all(isinstance(value, Mapping) for value in values):
        both = saved.keys() & before.keys() & now.keys()
        state = {key: value for key, value in saved.items() if key in now or key not in before}
        state |= {key: value for key, value in now.items() if key not in before}
        state |= {key: changed(saved[key], before[key], now[key]) for key in both}
        if _LAST_RATES in both:
            rates = _RATES if _RATES in both else _LAST_RATES
            scaled = zip(saved[_LAST_RATES], before[rates], now[rates], strict=False)
            state[_LAST_RATES] = [_scaled(*rate) for rate in scaled]
        return Counter(state) if isinstance(saved, Counter) else state  # milestones
    if all(isinstance(value, list) for value in values) and len(saved) == len(before) == len(now):
        return [changed(*parts) for parts in zip(*values, strict=True)]
    return now


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
