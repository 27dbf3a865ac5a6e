"""Metrics as lines of JSON."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class JSONLines(Logger):
    """Appends an object to a file for each step that is logged.

    Args:
        path: of the file; a run that goes on appends to it.
    """

    name = "jsonl"
    version = ""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: object) -> None:
        """Nothing: the run directory has the whole config."""
