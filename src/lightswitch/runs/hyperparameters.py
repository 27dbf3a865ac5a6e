"""Removal of values that came from the environment from the hyperparameters that are written to files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from lightswitch.config.confidential import Cleaner
from lightswitch.errors import Refused


class CleanHyperparameters(Callback):
    """Write an interpolation for each argument that came from the environment, in checkpoints.

    The module itself keeps the values.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cleaner = Cleaner.of(cfg)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for module in _modules(trainer):
            key = module.CHECKPOINT_HYPER_PARAMS_KEY
            if key in checkpoint:
                checkpoint[key] = self._cleaner.cleaned(checkpoint[key])


def log_hyperparameters(trainer: Trainer, cleaner: Cleaner, config: Mapping[str, Any] | None = None) -> None:
    """Send loggers the arguments that module and data have saved, as Lightning does, and the config, cleaned.

    Args:
        config: of the run, and the sizes of model, world and batch. Its keys go before those that were saved.

    Raises:
        Refused: both have saved an argument of one name, with different values.
    """
    saved = [module.hparams_initial for module in _modules(trainer) if module._log_hyperparams]
    first, last = (saved[0], saved[-1]) if saved else ({}, {})
    if differing := [name for name in first if name in last and repr(first[name]) != repr(last[name])]:
        raise Refused(
            f"model and data have both saved {', '.join(differing)}, with different values, and loggers keep one; add "
            "ignore=[...] to a save_hyperparameters"
        )
    for logger in trainer.loggers:
        if told := {**first, **last, **(config or {})}:
            logger.log_hyperparams(cleaner.cleaned(told))
        logger.log_graph(trainer.lightning_module)
        logger.save()


def _modules(trainer: Trainer) -> list[Any]:
    return [trainer.lightning_module, *filter(None, [trainer.datamodule])]  # type: ignore[attr-defined]  # set past Lightning's declaration
