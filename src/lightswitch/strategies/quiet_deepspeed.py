"""deepspeed, imported without what it says on the way."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import torch


def _imported() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    logging.disable(logging.INFO)  # to see whether there is a libaio it compiles a program, and the command is logged
    try:
        return importlib.import_module("deepspeed")
    finally:
        logging.disable(logging.NOTSET)


deepspeed = _imported()
