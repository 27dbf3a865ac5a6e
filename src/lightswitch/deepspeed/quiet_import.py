"""The deepspeed package, imported without its warnings about a missing GPU."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch


def _imported() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it found no GPU
    modules: dict[str, Any] = sys.modules
    modules.setdefault("mlflow", None)  # its autotuner, unused here, would import it for seconds
    try:
        return importlib.import_module("deepspeed")
    finally:
        if modules["mlflow"] is None:
            del modules["mlflow"]


deepspeed = _imported()
cpu_accelerator: Any = importlib.import_module("deepspeed.accelerator.cpu_accelerator")
