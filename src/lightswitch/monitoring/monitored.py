"""Lightning's callbacks that monitor a metric, for modules that log the metric under any of its common names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightswitch import regular_files
from lightswitch.errors import Refused, UnwrittenCheckpoint, listed
from lightswitch.monitoring import objective

log = logging.getLogger(__name__)
Mode = Literal["min", "max"]


class ValidateAtStart(Callback):
    """Callback that validates a new run before its first step, and logs that at step 0; a resumed run does not."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0 and trainer.enable_validation:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True


class Monitored(Callback):
    """Base class of callbacks that monitor a metric, which they look up once a validation has logged it.

    Args:
        monitor: the metric; None for the validation loss under the name that the module uses, or else for the only
            validation metric.
        mode: whether the lowest or the highest value is the best; None to derive it from the name.
        options: arguments of Lightning's callback.
    """

    monitor: Any  # a name; Lightning's callbacks declare different types
    mode: str

    def __init__(self, monitor: str | None = None, mode: Mode | None = None, **options: Any) -> None:
        name = monitor or objective.LOSS
        options |= {"monitor": name, "mode": mode or objective.mode(name)}
        super().__init__(**options)
        self._given, self._given_mode = monitor, mode

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}{{'monitor': {self._given!r}}}"  # the same before and after the metric is found

    def find(self, trainer: Trainer) -> str | None:
        """Set `monitor` to the matching metric among those logged so far, and return it; None if none matches.

        Raises:
            Refused: the configured metric is not logged.
        """
        found = objective.find(trainer.callback_metrics, self._given)
        if found is None and self._given is not None:
            raise Refused(objective.absent(self._given, trainer.callback_metrics))
        if found is not None:
            self.monitor = found
            if self._given_mode is None and objective.mode(found) != self.mode:
                self.set_mode(objective.mode(found))
        return found

    def set_mode(self, mode: Mode) -> None:
        """Set whether the lowest or the highest value is the best."""
        self.mode = mode


class BestCheckpoint(Monitored, ModelCheckpoint):
    """Lightning's ModelCheckpoint of the best validation.

    A value that is not finite is never the best. If no metric is found, no
    checkpoint is saved, and a warning is logged. Of several (`save_top_k`), each has its step in its name. Whatever
    their names, best.ckpt is the best by the first of such callbacks, or a link to it.

    Raises:
        UnwrittenCheckpoint: before the next checkpoint, or at the end of training, if that of the best validation could
            not be written: otherwise the next one would have a best that does not exist.
    """

    _has_reported = False
    _is_written = True  # whether the last save is known to have succeeded
    _has_written: Callable[[], bool]  # the strategy's methods
    _once_saved: Callable[[Callable[[], None]], None]
    _after_save: Callable[[Callable[[], None]], None]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # a strategy without these methods has written by now
        self._has_written = getattr(trainer.strategy, "has_written", lambda: True)
        self._once_saved = getattr(trainer.strategy, "once_saved", lambda action: action())
        self._after_save = getattr(trainer.strategy, "after_save", lambda action: action())
        self._is_first = next(one for one in trainer.checkpoint_callbacks if isinstance(one, BestCheckpoint)) is self
        if self.save_top_k not in (0, 1) and self.filename and "{" not in self.filename:
            self.filename += "_{step}"  # under one name, each would replace the one before

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero and os.path.exists(self.best_model_path):
            self._link_to(self.best_model_path, trainer)  # a run that goes back to an earlier step has another best

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._refuse_unwritten()

    def state_dict(self) -> dict[str, Any]:
        self._refuse_unwritten()
        return super().state_dict()

    def _refuse_unwritten(self) -> None:
        if not self._is_written and not self._has_written():
            raise UnwrittenCheckpoint(
                f"the checkpoint of the best validation, with {self.monitor} {self.best_model_score}, could not be "
                "written; make room and start the run again"
            )
        self._is_written = True

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._refuse_unwritten()
        super()._update_best_and_save(current, trainer, monitor_candidates)
        self._after_save(partial(setattr, self, "_is_written", False))
        if trainer.is_global_zero:
            self._once_saved(partial(self._link_to, self.best_model_path, trainer))

    def _link_to(self, best: str, trainer: Trainer) -> None:
        """Let best.ckpt, from which runs are evaluated and exported, be a link to the best checkpoint."""
        of_run = Path(trainer.default_root_dir, "checkpoints")
        link = (of_run if of_run.is_dir() else Path(best).parent) / f"best{self.FILE_EXTENSION}"
        if not self._is_first or link == Path(best) or (link.exists() and not regular_files.is_link(link)):
            return
        regular_files.write_link(link, os.path.relpath(best, link.parent))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._every_n_train_steps or self._train_time_interval is not None:  # otherwise Lightning saves nothing here
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _has_validated(trainer) and self._report(trainer, self.find(trainer)):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _has_validated(trainer) and self._report(trainer, self.find(trainer)):
            super().on_validation_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        if current is not None and not torch.isfinite(current):
            log.warning(
                "best       is not step %d, because %s is %s", trainer.global_step, self.monitor, current.item()
            )
            return False
        return super().check_monitor_top_k(trainer, current)

    def set_mode(self, mode: Mode) -> None:
        super().set_mode(mode)
        if torch.isinf(self.kth_value):  # not restored from a checkpoint
            self.kth_value = _worst(mode)

    def _report(self, trainer: Trainer, found: str | None) -> bool:
        """Return whether a metric is found; log it once on rank 0 unless it is the expected one, or warn if none is."""
        if not self._has_reported and trainer.is_global_zero:
            self._has_reported = True
            if found is None:
                logged = listed(objective.of_module(trainer.callback_metrics), "metrics", shown=8) or "no metric"
                log.warning(
                    "best       is not saved: of %s, none is val/loss; type callbacks.best_checkpoint.monitor=NAME",
                    logged,
                )
            elif found != objective.LOSS and (found != self._given or self._given_mode is None):
                log.info("best       is the %sest %s", {"min": "low", "max": "high"}[self.mode], found)
        return found is not None


class EarlyStop(Monitored, EarlyStopping):
    """Lightning's EarlyStopping, with the metric found as in `Monitored`."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)
        super().on_validation_end(trainer, pl_module)

    def set_mode(self, mode: Mode) -> None:
        super().set_mode(mode)
        self.min_delta *= -1  # Lightning's sign of min_delta depends on the mode
        if torch.isinf(self.best_score):  # not restored from a checkpoint
            self.best_score = _worst(mode)

    def _check(self, trainer: Trainer) -> None:
        if _has_validated(trainer) and self.find(trainer) is None:
            raise Refused(objective.absent(objective.LOSS, trainer.callback_metrics))


def _has_validated(trainer: Trainer) -> bool:
    """Return whether a validation has run during training, so that its metrics exist."""
    is_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
    return is_fit and trainer.fit_loop.epoch_loop.val_loop._has_run


def _worst(mode: Mode) -> Tensor:
    return torch.tensor(torch.inf if mode == "min" else -torch.inf)
