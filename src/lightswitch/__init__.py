"""The engine: one training run, any strategy.

import lightswitch

run = lightswitch.train("model=gpt", "strategy=ddp", "trainer.devices=2")
model = run.load()                                 # or of any other run: lightswitch.load("runs/NAME/RUN_ID")
logits = model(ids)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # before any import of what Windows lacks: signals, locks of files, forked processes
    sys.stderr.write("error: found Windows, expected Linux or macOS; type wsl --install, and start it in WSL\n")
    from lightswitch.errors import ExitCode

    raise SystemExit(ExitCode.REFUSED)

if TYPE_CHECKING:
    from lightswitch.export.models import load
    from lightswitch.launch.from_python import FailedRun, Run, compose, train

__all__ = ["FailedRun", "Run", "compose", "load", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    # on first use: they import torch or Hydra, which most of the launch does not need
    return getattr(
        import_module("lightswitch.export.models" if name == "load" else "lightswitch.launch.from_python"), name
    )
