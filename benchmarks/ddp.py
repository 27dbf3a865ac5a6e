"""Time of a training step of two processes through train.py, against the same step of plain DistributedDataParallel,
`fully_shard` and DeepSpeed.

Also the time per step of the guards of every run: the comparison of replicas, and the examination of weights for
writes.

python -m benchmarks.ddp
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import mlp
from benchmarks.contenders import CHECKPOINT_STEPS, CLIP_NORM, LOG_STEPS, Turns, raw_steps
from benchmarks.results import options, publish, row
from lightswitch.strategies.agreement import Agreement

CHECKOUT = Path(__file__).parents[1]
BATCH, PROCESSES = 32, 2
DDP, GUARDS = "MLP, two processes", "replicas compared, two processes"
BETWEEN, LOOKS = "MLP, two processes, fsdp, between looks", "weights looked at, two processes, fsdp"
# for each strategy: the row, what it is measured against, and its target
AGAINST = {
    "ddp": (DDP, "plain DDP", "≤ 1.2"),
    "fsdp": ("MLP, two processes, fsdp", "plain fully_shard", "≤ 1.2"),
    "deepspeed_stage_2": ("MLP, two processes, ZeRO-2", "plain DeepSpeed", "≤ 1.1"),
}


class RankTurns(Turns):
    """Turns with a plain loop in the same processes, in wall time, which includes the wait of one process for the
    other.

    Args:
        strategy: whose plain loop it is.
        file: file for the seconds of each turn, which rank 0 writes.
    """

    def __init__(self, strategy: str, samples: int, count: int, steps_each: int, file: str) -> None:
        super().__init__(RAW[strategy](samples), count, steps_each, clock=time.perf_counter)
        self.strategy, self.file = strategy, Path(file)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name, against, _ = AGAINST[self.strategy]
        found = {name: self.seconds, against: self.raw_seconds}
        if self.strategy == "ddp":
            found[GUARDS] = [_guard_seconds(trainer, pl_module) for _ in self.seconds]
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(found))


def _guard_seconds(trainer: Trainer, module: LightningModule) -> float:
    """Return the seconds per step of the comparison of replicas: its share of a save, and a call in each step."""
    (guard,) = (one for one in trainer.callbacks if isinstance(one, Agreement))
    saves, steps = 20, 1000
    begin = time.perf_counter()
    for _ in range(saves):
        guard.on_save_checkpoint(trainer, module, {})
    saved = time.perf_counter()
    for _ in range(steps):
        guard.on_train_batch_start(trainer, module, None, 0)
    return (saved - begin) / saves / CHECKPOINT_STEPS + (time.perf_counter() - saved) / steps


class LookedAt(Callback):
    """Callback that has the weights examined in every other block of steps, as in the steps before a save.

    Args:
        blocks: number of pairs of blocks.
        steps: steps per block.
        file: file for the seconds per step without examinations, and the seconds per step of examinations; rank 0
            writes it.
    """

    def __init__(self, blocks: int, steps: int, file: str) -> None:
        self.blocks, self.steps, self.file = blocks, steps, Path(file)
        self._begins: list[float] = []  # of blocks, in seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        block, step = divmod(batch_idx - self.steps, self.steps)  # the first steps are not measured
        if block >= 0 and step == 0:
            self._begins.append(time.perf_counter())
        if block % 2:
            trainer.strategy.to_examine = 1  # type: ignore[attr-defined]  # one of the engine's strategies

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = [(end - begin) / self.steps for begin, end in pairwise(self._begins)]
        plain, looked = seconds[::2], seconds[1::2]
        # one step of those between two checkpoints is examined
        taken = [
            max(1e-9, with_look - without) / CHECKPOINT_STEPS for without, with_look in zip(plain, looked, strict=True)
        ]
        if trainer.is_global_zero:
            self.file.write_text(json.dumps({BETWEEN: plain, LOOKS: taken}))


def main() -> None:
    given = options("ddp", __doc__.splitlines()[0])
    seconds = measured(given.quick)
    rows = [row(name, against, seconds, target) for name, against, target in AGAINST.values()]
    guards = [row(GUARDS, DDP, seconds, "≤ 0.01"), row(LOOKS, BETWEEN, seconds, "≤ 0.01")]
    publish([*rows, *guards], given, per="a step")


def measured(quick: bool) -> dict[str, list[float]]:
    """Return the seconds of each turn by contender; each turn contains one checkpoint."""
    turns, steps = (2, 5) if quick else (12, CHECKPOINT_STEPS)
    samples = BATCH * (turns * steps + 100)  # all in one epoch
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "model._target_": "benchmarks.mlp.MLP",
            "data._target_": "benchmarks.mlp.PointsData",
            "data.samples": samples,
            "trainer.accelerator": "cpu",
            "trainer.devices": PROCESSES,
            "global_batch_size": BATCH,
            "trainer.max_steps": Turns.steps_of(turns, steps),
            "trainer.log_every_n_steps": LOG_STEPS,
            "trainer.gradient_clip_val": CLIP_NORM,
            "trainer.limit_val_batches": 0,
            "trainer.limit_test_batches": 0,
            "callbacks.last_checkpoint.every_n_steps": CHECKPOINT_STEPS,
        }
        seconds: dict[str, list[float]] = {}
        for strategy in AGAINST:
            turned = {"strategy": strategy, "samples": samples, "count": turns, "steps_each": steps}
            seconds |= _train({"strategy": strategy, **arguments}, folder, "RankTurns", turned)
        blocks = {"blocks": turns, "steps": steps}
        arguments["trainer.max_steps"] = steps * (2 + 2 * turns)
        return seconds | _train({"strategy": "fsdp", **arguments}, folder, "LookedAt", blocks)


def _train(arguments: dict[str, Any], folder: str, callback: str, options: dict[str, Any]) -> dict[str, list[float]]:
    """Train with a callback of this module, and return the seconds that the callback writes to its file."""
    file = Path(folder, f"{callback}.json")
    given = {"_target_": f"benchmarks.ddp.{callback}", "file": file, **options}
    overrides = [f"{key}={value}" for key, value in arguments.items()]
    overrides += [f"callbacks.measured.{key}={value}" for key, value in given.items()]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"}
    command = [sys.executable, str(CHECKOUT / "train.py"), *overrides]
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
    seconds: dict[str, list[float]] = json.loads(file.read_text())
    return seconds


# Each plain loop is created at its first step, when there is a process group, and yields after each step.


def _ddp(samples: int) -> Iterator[None]:
    model = mlp.MLP()
    model.net = DistributedDataParallel(model.net)
    yield from raw_steps(model, _data(samples), lambda batch: model.training_step(batch, 0))


def _fsdp(samples: int) -> Iterator[None]:
    model = mlp.MLP()
    fully_shard(model.net).set_force_sum_reduction_for_comms(True)  # gloo has no mean
    yield from raw_steps(model, _data(samples), lambda batch: model.training_step(batch, 0))


def _deepspeed(samples: int) -> Iterator[None]:
    import deepspeed  # an extra, in this loop alone

    model, data = mlp.MLP(), _data(samples)
    data.setup("fit")
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // PROCESSES,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model.net, optimizer=model.configure_optimizers(), config=settings)
    model.net = engine
    for batch in itertools.chain.from_iterable(itertools.repeat(data.train_dataloader())):
        engine.backward(model.training_step(batch, 0))
        engine.step()
        yield


RAW = {"ddp": _ddp, "fsdp": _fsdp, "deepspeed_stage_2": _deepspeed}


def _data(samples: int) -> mlp.PointsData:
    return mlp.PointsData(samples, BATCH // PROCESSES)


if __name__ == "__main__":
    main()
