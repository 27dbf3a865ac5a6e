"""A callback that counts what rank 0 does in its steps: calls of Python functions, and collectives of all libraries.

One save is among the steps in which collectives are counted, and two that are logged.
"""

from __future__ import annotations

import cProfile
import json
import pstats
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

STEPS = 500  # in which calls are counted
_FIRST = 100
_COLLECTIVES = 100  # steps in which they are counted


class Counts(Callback):
    """Writes calls of a step, and collectives of a step by name, to a file.

    cProfile counts calls of Python and of C; torch's profiler sees collectives of C++ as well, such as DDP's.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.calls = cProfile.Profile()
        self.collectives = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == _FIRST + _COLLECTIVES // 4:
            trainer.save_checkpoint(self.path.with_name("counted.ckpt"))
        if not trainer.is_global_zero:
            return
        if batch_idx == _FIRST:
            self.collectives.start()
        if batch_idx == _FIRST + _COLLECTIVES:
            self.collectives.stop()
            self.calls.enable()
        if batch_idx == _FIRST + _COLLECTIVES + STEPS:
            self.calls.disable()
            self._write()

    def _write(self) -> None:
        names = (event.name for event in self.collectives.events() or ())
        seen = Counter(name.removeprefix("gloo:") for name in names if name.startswith("gloo:"))
        found = {
            "calls": pstats.Stats(self.calls).total_calls / STEPS,  # type: ignore[attr-defined]  # set by its base
            "collectives": {name: count / _COLLECTIVES for name, count in seen.items()},
        }
        self.path.write_text(json.dumps(found))
