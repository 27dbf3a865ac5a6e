"""deepspeed, imported without what it says where there is no GPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch


def _imported() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    return importlib.import_module("deepspeed")


deepspeed = _imported()
