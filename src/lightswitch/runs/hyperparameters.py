"""Removal of values that came from the environment from the hyperparameters that are written to files."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from lightswitch import patches
from lightswitch.config.confidential import Cleaner


class CleanHyperparameters(Callback):
    """Write an interpolation for each argument that came from the environment, in loggers and checkpoints.

    The module itself keeps the values.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cleaner = Cleaner.of(cfg)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for module in _modules(trainer):
            if hasattr(module, "_hparams_initial"):  # the copy that loggers are given
                patches.replace(module, "_hparams_initial", self._cleaner.cleaned(module._hparams_initial))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for module in _modules(trainer):
            key = module.CHECKPOINT_HYPER_PARAMS_KEY
            if key in checkpoint:
                checkpoint[key] = self._cleaner.cleaned(checkpoint[key])


def _modules(trainer: Trainer) -> list[Any]:
    return [trainer.lightning_module, *filter(None, [trainer.datamodule])]  # type: ignore[attr-defined]  # set past Lightning's declaration
