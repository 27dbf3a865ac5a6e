"""last.ckpt: what a run goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightswitch.checkpoints.directory import read_state
from lightswitch.checkpoints.last import LastCheckpoint
from tests.conftest import PLAIN, Train

RUN = (
    *PLAIN,
    "trainer.accelerator=cpu",
    "run_id=mine",
    "trainer.val_check_interval=100",
    "trainer.limit_val_batches=0",
)

WATCH = """
import os
import lightning.pytorch as pl

class Watch(pl.Callback):
    \"\"\"Writes down which checkpoints there are, and what is at last.ckpt, after each step.\"\"\"

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        path = os.path.join(self.folder, "last.ckpt")
        stamp = os.stat(path).st_ino if os.path.exists(path) else None
        with open("seen.txt", "a") as file:
            print(trainer.global_step, stamp, *sorted(os.listdir(self.folder)) if stamp else [], file=file)
"""


def test_last_is_replaced_every_so_many_steps_and_at_the_end(train: Train, tmp_path: Path) -> None:
    (tmp_path / "watching.py").write_text(WATCH)
    run = train(
        *RUN,
        "trainer.max_steps=8",
        "callbacks.last_checkpoint.every_n_steps=3",
        "callbacks.watch._target_=watching.Watch",
        "callbacks.watch.folder=${hydra:runtime.output_dir}/checkpoints",
        folder=tmp_path,
    )
    files = [line.split()[1:] for line in (tmp_path / "seen.txt").read_text().splitlines()]
    written = [inode for inode, *_ in files]
    assert written[:3] == ["None"] * 3
    assert written[3] == written[4] == written[5] != "None"
    assert written[6] == written[7] != written[5]
    assert all(names == ["last.ckpt"] for _, *names in files[3:])  # no partial file between steps
    assert read_state(run.run_dir / "checkpoints" / "last.ckpt")["global_step"] == 8


def test_steps_are_counted_whatever_the_accumulation(train: Train) -> None:
    run = train(
        *RUN, "trainer.max_steps=3", "micro_batch_size=16", "callbacks.last_checkpoint.every_n_steps=2", "resume=never"
    )
    assert read_state(run.run_dir / "checkpoints" / "last.ckpt")["global_step"] == 3


def test_every_n_steps_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="every_n_steps is 0; it counts optimizer steps, so it is at least 1"):
        LastCheckpoint("anywhere", every_n_steps=0)
