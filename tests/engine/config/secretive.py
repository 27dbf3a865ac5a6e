"""A run with secrets in its environment and its config, and a stranger who looks at the store where its ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import psutil
from torch._C._distributed_c10d import TCPStore

from tests.engine.failures.failing import FailingModel
from tests.engine.plain import PlainData


class SecretModel(FailingModel):
    """Is given secrets, and has them among its hyperparameters."""

    def __init__(self, token: str, pem: str = "", pin: int = 0, api_key: str = "", **rest: object) -> None:
        super().__init__(**rest)  # type: ignore[arg-type]
        self.token = token
        self.save_hyperparameters()


class SecretData(PlainData):
    def __init__(self, password: str) -> None:
        super().__init__()
        self.save_hyperparameters()


class Stranger(pl.Callback):
    """Reads the whole store once rank 0 has told what it has, and waits for rank 1."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        if os.environ.get("RANK") == "1":
            place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
            store = TCPStore(*place, timedelta(seconds=300), wait_for_workers=False)
            store.wait(["meeting/0"])
            held = "\n".join(f"{key} {store.get(key)!r}" for key in store.list_keys())
            (self.folder / "before").write_text(held)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            listening = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
            port = int(os.environ["MASTER_PORT"])
            (self.folder / "served").write_text(" ".join(one.ip for one in listening if one.port == port))
