"""What refuses to be made, to be set up, to be logged to, or to be tested."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from tests.engine.plain import PlainData, PlainModel


class BadWidth(PlainModel):
    def __init__(self, width: int = 16) -> None:
        raise ValueError(f"width is {width}; expected an even number")


class BadData(PlainModel):
    """Finds out when it has seen the data, after the ranks have formed their group."""

    def setup(self, stage: str) -> None:
        raise ValueError("the data has 5 classes; expected 4")


class Lost(Callback):
    def __init__(self) -> None:
        self.text = Path("lost.txt").read_text()


class LostData(PlainData):
    def __init__(self) -> None:
        self.text = Path("nowhere.txt").read_text()


class NoKey(Logger):
    name = version = ""
    log_metrics = log_hyperparams = lambda *_, **__: None

    @property
    def experiment(self) -> None:
        raise RuntimeError("no API key configured")
