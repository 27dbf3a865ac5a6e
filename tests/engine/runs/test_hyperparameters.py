"""Loggers are sent the arguments that module and data have saved, without what came from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightswitch.config.confidential import Cleaner
from lightswitch.errors import Refused
from lightswitch.runs.record import log_hyperparameters
from tests.engine.monitoring.tiny import Regression, loader, trainer

CONFIG = {"model": {"width": 8, "token": "hunter2!"}, "sizes": {"devices": 2}}
CLEANER = Cleaner((("hunter2!", "${oc.env:TOKEN}"),))


class Saving(Regression):
    def __init__(self, width: int, token: str = "hunter2!") -> None:
        super().__init__()
        self.save_hyperparameters()


class SavingData(LightningDataModule):
    def __init__(self, width: int, path: str = "data") -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(8)


class Logging(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_hyperparameters(trainer, CLEANER, CONFIG)


def _logged(folder: Path, module: LightningModule, data: LightningDataModule) -> dict[str, Any]:
    options = {"max_steps": 1, "log_every_n_steps": 1, "enable_autolog_hparams": False}
    trainer(folder, callbacks=[Logging()], logger=CSVLogger(folder, "", ""), **options).fit(module, datamodule=data)
    logged: dict[str, Any] = yaml.safe_load((folder / "hparams.yaml").read_text())
    return logged


def test_arguments_of_module_and_data_are_logged_and_the_module_keeps_its_own(tmp_path: Path) -> None:
    module = Saving(8)
    config = {"model": {"width": 8, "token": "${oc.env:TOKEN}"}, "sizes": {"devices": 2}}
    saved = {"width": 8, "token": "${oc.env:TOKEN}", "path": "data"}
    assert _logged(tmp_path, module, SavingData(8)) == {**saved, **config}
    assert module.hparams.token == "hunter2!"


def test_an_argument_that_has_two_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="model and data have both saved width, with different values"):
        _logged(tmp_path, Saving(8), SavingData(9))
