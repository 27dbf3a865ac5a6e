"""The one moment at which a run is saved: between two steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightswitch import patches
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.checkpoints.writing import WrittenTogether


class StepBoundary(Callback):
    """Callback of the moment between two steps, at which all checkpoints of a run are taken.

    All hooks of the step before have run, its validation and the end of its epoch included, and no hook of a user of
    the next step. Before the first step of an epoch, it is the epoch's start. The end of training is such a moment,
    too; where a limit cuts the last epoch short, the moment is before that epoch's end, so that a longer run goes on
    from it as if it had been as long from the start.

    A checkpoint that a callback or the module asks for at another moment is put off to this one. It would have the
    effects of some hooks of a step only, and be without its validation, and no resumed run could make up for that.
    List this callback before those of the user.
    """

    def __init__(self) -> None:
        self._puts_off = False
        self._waiting: list[Callable[[], None]] = []  # saves that are put off, and what follows each, in order
        self._last: list[LastCheckpoints] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            patches.replace(
                trainer, "save_checkpoint", functools.partial(self._save_or_put_off, trainer.save_checkpoint)
            )
            if isinstance(trainer.strategy, WrittenTogether):
                trainer.strategy.waiting = self._waiting

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoints)]
        self._puts_off = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_and_go_on(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx and batch_idx % trainer.accumulate_grad_batches == 0:
            self._save_and_go_on(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():  # a limit has cut the epoch short
            self._take_put_off()
            for last in self._last:
                last.save(trainer)
            self._puts_off = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_put_off()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._puts_off = False  # for callbacks that save the weights of a run that fails

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        patches.restore(trainer, "save_checkpoint")

    def _save_and_go_on(self, trainer: Trainer) -> None:
        self._take_put_off()
        for last in self._last:
            last.save_if_due(trainer)
        self.end_if_asked(trainer)
        self._puts_off = True

    def end_if_asked(self, trainer: Trainer) -> None:
        """End training here if it is asked to; subclasses know by whom."""

    def _save_or_put_off(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._puts_off:
            self._waiting.append(functools.partial(save, *args, **kwargs))
        else:
            save(*args, **kwargs)

    def _take_put_off(self) -> None:
        self._puts_off = False
        while self._waiting:
            self._waiting.pop(0)()
