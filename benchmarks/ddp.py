"""Time of a training step of two processes through train.py, against the same step of plain DistributedDataParallel.

python -m benchmarks.ddp
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import mlp
from benchmarks.contenders import CHECKPOINT_STEPS, CLIP_NORM, LOG_STEPS, Turns, raw_steps
from benchmarks.results import options, publish, row
from lightswitch.strategies.replicas import EqualReplicas

CHECKOUT = Path(__file__).parents[1]
BATCH, PROCESSES = 32, 2
DDP, RAW, GUARDS = "MLP, two processes", "plain DDP", "replicas compared, two processes"


class DDPTurns(Turns):
    """Turns with a plain loop in the same processes, by wall time: what one waits for the other counts.

    Args:
        file: to write the seconds of each turn to, on rank 0.
    """

    def __init__(self, samples: int, count: int, steps_each: int, file: str) -> None:
        super().__init__(_raw(samples), count, steps_each, clock=time.perf_counter)
        self.file = Path(file)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        guards = [_guard_seconds(trainer, pl_module) for _ in self.seconds]
        if trainer.is_global_zero:
            self.file.write_text(json.dumps({DDP: self.seconds, RAW: self.raw_seconds, GUARDS: guards}))


def _guard_seconds(trainer: Trainer, module: LightningModule) -> float:
    """Return what the comparison of replicas takes of a step: its part of a save, and a call in each step."""
    (guard,) = (one for one in trainer.callbacks if isinstance(one, EqualReplicas))
    saves, steps = 20, 1000
    begin = time.perf_counter()
    for _ in range(saves):
        guard.on_save_checkpoint(trainer, module, {})
    saved = time.perf_counter()
    for _ in range(steps):
        guard.on_train_batch_start(trainer, module, None, 0)
    return (saved - begin) / saves / CHECKPOINT_STEPS + (time.perf_counter() - saved) / steps


def main() -> None:
    given = options("ddp", __doc__.splitlines()[0])
    seconds = measured(given.quick)
    publish([row(DDP, RAW, seconds, "≤ 1.3"), row(GUARDS, DDP, seconds, "≤ 0.01")], given, per="a step")


def measured(quick: bool) -> dict[str, list[float]]:
    """Each turn has one checkpoint in it."""
    turns, steps = (2, 5) if quick else (12, CHECKPOINT_STEPS)
    samples = BATCH * (turns * steps + 100)  # one epoch holds them
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seconds.json")
        arguments = {
            "model._target_": "benchmarks.mlp.MLP",
            "data._target_": "benchmarks.mlp.PointsData",
            "data.samples": samples,
            "strategy": "ddp",
            "trainer.accelerator": "cpu",
            "trainer.devices": PROCESSES,
            "global_batch_size": BATCH,
            "trainer.max_steps": Turns.steps_of(turns, steps),
            "trainer.log_every_n_steps": LOG_STEPS,
            "trainer.gradient_clip_val": CLIP_NORM,
            "trainer.limit_val_batches": 0,
            "trainer.limit_test_batches": 0,
            "callbacks.last_checkpoint.every_n_steps": CHECKPOINT_STEPS,
            "callbacks.turns._target_": "benchmarks.ddp.DDPTurns",
            "callbacks.turns.samples": samples,
            "callbacks.turns.count": turns,
            "callbacks.turns.steps_each": steps,
            "callbacks.turns.file": file,
        }
        _train([f"{key}={value}" for key, value in arguments.items()], folder)
        seconds: dict[str, list[float]] = json.loads(file.read_text())
    return seconds


def _train(overrides: list[str], folder: str) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"}
    command = [sys.executable, str(CHECKOUT / "train.py"), *overrides]
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)


def _raw(samples: int) -> Iterator[None]:
    """The loop is made at its first step: there is a process group by then."""
    model = mlp.MLP()
    net = DistributedDataParallel(model.net)

    def loss(batch: Any) -> Any:
        return F.cross_entropy(net(batch[0]), batch[1])

    yield from raw_steps(model, mlp.PointsData(samples, BATCH // PROCESSES), loss)


if __name__ == "__main__":
    main()
