"""What each rank of a run says of its place in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lightning.pytorch as pl

WITNESS = (
    "callbacks.witness._target_=tests.engine.launch.witness.Witness",
    "callbacks.witness.folder=${hydra:runtime.output_dir}",
)
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Witness(pl.Callback):
    """Writes witness_<rank>.json when training starts."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        launcher = strategy.launcher
        seen = {
            "strategy": type(strategy).__name__,
            "launcher": type(launcher).__name__ if launcher else None,
            "cluster": type(getattr(strategy, "cluster_environment", None)).__name__,
            "precision": trainer.precision,
            "world_size": trainer.world_size,
            "node_rank": trainer.node_rank,
            "local_rank": trainer.local_rank,
            "hparams": dict(module.hparams),
            "environment": [os.environ.get(name) for name in VARIABLES],
        }
        (self.folder / f"witness_{trainer.global_rank}.json").write_text(json.dumps(seen))


def witnesses(run_dir: Path) -> list[dict]:
    """By rank."""
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("witness_*.json"))]
