"""Promise 3: killed at any moment, a run goes on exactly where it was."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from threading import Timer
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.engine.conftest import PLAIN, Train
from tests.engine.tiny import RECORD

RUN = (
    *PLAIN,
    "run_id=mine",
    "trainer.accelerator=cpu",
    "global_batch_size=24",  # 9 steps an epoch, the last of them smaller
    "trainer.val_check_interval=4",
    "trainer.log_every_n_steps=1",
    "callbacks.last_checkpoint.every_n_steps=2",
    *RECORD,
)
AVERAGED = ("callbacks=[default,ema]", "callbacks.ema.decay=0.9")
RANDOM = ("model.dropout=0.3", "data.noise=0.1")
WAYS = {
    "ddp, accumulation, loader workers": (
        ("strategy=ddp", "micro_batch_size=4", "data.workers=1", "model.halved=step"),
        2,
    ),
    "fsdp": (("strategy=fsdp", "model.halved=epoch", *AVERAGED), 2),
    "deepspeed": (("strategy=deepspeed_stage_2", "model.halved=step", *AVERAGED), 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_a_run_killed_over_and_over_is_the_uninterrupted_one_to_the_bit(way: str, train: Train) -> None:
    """At five moments that nobody chose, by chance and by augmentation, too."""
    kills, switches, ranks = 5, (*WAYS[way][0], *RANDOM), WAYS[way][1]
    steps = 12 + 12 * kills  # the last of them in the twelve after the newest checkpoint
    run = (*RUN, f"trainer.max_steps={steps}", *switches)
    whole = train(*run, ranks=ranks)
    folder = None
    for attempt in range(kills):
        kill = (
            "callbacks.kill._target_=tests.engine.checkpoints.test_killed.Kill",
            f"callbacks.kill.seed={len(way) + attempt}",
        )
        killed = train(*run, *kill, ranks=ranks, folder=folder, check=False)
        assert killed.returncode == -9, killed.err
        folder = killed.folder
    ended = train(*run, ranks=ranks, folder=folder)
    for name in ("train/loss", "val/loss", "val/accuracy", "samples"):
        assert ended.column(name) == whole.column(name), name
    assert ended.column("test/loss")[steps] == whole.column("test/loss")[steps]
    assert _trained_on(ended.run_dir) == _trained_on(whole.run_dir)


def _trained_on(run_dir: Path) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """By epoch and step, the micro batches of all ranks; a step that was repeated after a kill read the same again."""
    steps: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for path in run_dir.glob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # the last one may be cut short
                read = json.loads(line)
                steps.setdefault((read["epoch"], read["step"]), set()).add(tuple(read["ids"]))
    return steps


# How a run ends as by a power cut, at a moment that nobody chose


class Kill(pl.Callback):
    """SIGKILL within a few steps: between steps, in one, in a validation, while a checkpoint is written.

    Five steps are two saves of a run that saves every second one, and the second waits until the first is written.
    The run goes no further than three steps: on a busy machine, the moment may be late.
    """

    killed_from = 1 << 30

    def __init__(self, seed: int | str) -> None:
        self.moment = random.Random(seed)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.step = trainer.global_step + self.moment.randrange(5, 13)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        time.sleep(0.01)  # or a run would be over before a checkpoint is written
        while trainer.global_step >= self.killed_from + 3:
            time.sleep(1)
        if trainer.global_step >= self.step:
            self.step, self.killed_from = 1 << 30, trainer.global_step
            timer = Timer(self.moment.random() * 0.08, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
