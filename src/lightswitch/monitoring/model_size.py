"""Class and size of the model that a run trains."""

from __future__ import annotations

import functools
import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

log = logging.getLogger(__name__)


class ModelSize(Callback):
    """Callback that logs the model's class and number of parameters once, before a strategy takes it apart.

    `configure_model` is the user's, and is left to Lightning: called once more, it may read weights, or form a process
    group that other ranks know nothing of.
    """

    def __init__(self) -> None:
        self._is_told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._is_told or not trainer.is_global_zero:
            return
        self._is_told = True
        if is_overridden("configure_model", pl_module):
            _after_configure_model(pl_module)
        else:
            _tell(pl_module)


def _after_configure_model(model: LightningModule) -> None:
    configure = model.configure_model

    @functools.wraps(configure)
    def told() -> Any:
        del model.configure_model  # of this instance, so that the class's is found again
        configure()
        _tell(model)

    model.configure_model = told  # type: ignore[method-assign]  # of this instance alone


def _tell(model: LightningModule) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    log.info("model      %s, %.2f M parameters", type(model).__name__, count / 1e6)
