"""The stages fit, test, validate and predict, each of which returns its metrics."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.context import RunContext
from lightswitch.errors import Refused, shown

log = logging.getLogger(__name__)

Metrics = dict[str, float]
Data = LightningDataModule | None  # a module may have its own loaders

_NEEDS = {  # the module's step and the dataloader hook; Lightning has a default predict_step
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": (None, "predict_dataloader"),
}


def fit(run: RunContext, model: LightningModule, data: Data, trainer: Trainer, checkpoint: Path | None) -> Metrics:
    """Train, starting from a checkpoint if one is given.

    Args:
        run: as in the other stages, for train.py of forks, which pass it.

    Raises:
        Refused: the strategy would unpickle the checkpoint.
    """
    _refuse_to_unpickle(trainer, checkpoint)
    trainer.ckpt_path = checkpoint  # callbacks read it before `fit` would set it from an argument
    trainer.fit(model, datamodule=data, weights_only=True)
    trainer.ckpt_path = None  # the test uses another checkpoint
    return _metrics(trainer)


def test_best(run: RunContext, model: LightningModule, data: Data, trainer: Trainer) -> Metrics:
    """Test the best checkpoint by the monitored metric, or the last weights if nothing was monitored."""
    if trainer.interrupted or lacking("test", model, data):
        return {}
    best = next(filter(None, (getattr(one, "best_model_path", None) for one in trainer.checkpoint_callbacks)), None)
    if trainer.is_global_zero:
        log.info("tests      %s", shown(Path(best)) if best else "the last weights")
    trainer.test(model, datamodule=data, ckpt_path=best, verbose=False, weights_only=True)
    return _metrics(trainer)


def evaluate(run: RunContext, model: LightningModule, data: Data, trainer: Trainer, checkpoint: Path | None) -> Metrics:
    """Validate, test or predict, depending on the run's mode, with the weights of a checkpoint.

    Raises:
        Refused: the module or its data lack a method that the mode needs, or the strategy would unpickle the
            checkpoint.
    """
    if message := lacking(run.mode, model, data):
        others = [f"mode={stage}" for stage in _NEEDS if not lacking(stage, model, data)]
        raise Refused(f"mode={run.mode}: {message}; " + (f"type {' or '.join(others)}" if others else "write one"))
    _refuse_to_unpickle(trainer, checkpoint)
    read: dict[str, Any] = {"ckpt_path": checkpoint, "weights_only": True}
    if run.mode == "predict":
        trainer.predict(model, datamodule=data, return_predictions=True, **read)
    else:
        stage = trainer.validate if run.mode == "validate" else trainer.test
        stage(model, datamodule=data, verbose=False, **read)
    return _metrics(trainer)


def lacking(stage: str, model: LightningModule, data: Data) -> str | None:
    """Return a message about a method that an evaluation stage needs and that is missing; None if none is missing."""
    step, loader = _NEEDS[stage]
    if step and not is_overridden(step, model):
        return f"{type(model).__name__} has no {step}"
    if not any(owner is not None and is_overridden(loader, owner) for owner in (data, model)):
        return f"{type(data or model).__name__} has no {loader}"
    return None


def _refuse_to_unpickle(trainer: Trainer, checkpoint: Path | None) -> None:
    """Refuse a checkpoint directory for a strategy that is not the engine's: such a strategy may unpickle its files."""
    if checkpoint is not None and checkpoint.is_dir() and not isinstance(trainer.strategy, PortableCheckpoints):
        name = type(trainer.strategy).__name__
        raise Refused(
            f"{shown(checkpoint)} is a directory, which {name} can't read without running code; use strategy=ddp"
        )


def _metrics(trainer: Trainer) -> Metrics:
    if isinstance(trainer.strategy, PortableCheckpoints):
        trainer.strategy.finish_saving()  # what `on_fit_end` or `teardown` has saved
    return {name: value.item() for name, value in trainer.callback_metrics.items()}
