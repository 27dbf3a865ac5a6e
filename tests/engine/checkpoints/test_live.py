"""Readers of a run that goes on, and writes a checkpoint in each step: one of them, whole, or a line to try again."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightswitch
from lightswitch.compare import files
from lightswitch.errors import Refused
from tests.engine.processes import TRAIN_PY, Start
from tests.runs import Finished, Train

TIMES = 2
CLOCK = (
    *(f"model._target_={__name__}.Clock", "data._target_=tests.engine.plain.PlainData"),
    *("trainer.accelerator=cpu", "strategy=single", "trainer.gradient_clip_val=null"),
)
LIVE = (
    *("run_id=live", "trainer.max_steps=100000", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1"),
    *("callbacks.last_checkpoint.every_n_steps=1", "callbacks.last_checkpoint.keep=1"),
)


class Clock(pl.LightningModule):
    """All of whose weights are the number of steps: those of two checkpoints differ."""

    def __init__(self) -> None:
        super().__init__()
        self.hands = nn.ParameterList([torch.zeros(1000) for _ in range(12)])

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([hand.mean() for hand in self.hands])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -sum(hand.sum() for hand in self.hands)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", -self.hands[0][0])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        hands = torch.cat(list(self.hands))
        self.log("test/apart", hands.max() - hands.min())
        self.log("test/steps", hands.min())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.fixture
def live(start: Start, tmp_path: Path) -> Iterator[Path]:
    process = start(sys.executable, TRAIN_PY, *CLOCK, *LIVE)
    run_dir = tmp_path / "runs" / "clock" / "live"
    while not (run_dir / "checkpoints" / "best.ckpt").exists():
        assert process.poll() is None, "it has begun"
        time.sleep(0.1)
    yield run_dir
    assert process.poll() is None, "it went on meanwhile"


@pytest.mark.timeout(300)
def test_what_is_read_of_a_run_that_goes_on_is_whole(live: Path, train: Train) -> None:
    steps = []
    other = train(*CLOCK, "trainer.max_steps=2").run_dir
    for _, name in itertools.product(range(TIMES), ("best", "last")):
        path = live / "checkpoints" / f"{name}.ckpt"
        steps += [evaluated(path, train), begun(path, train), loaded(path)]
        list(files.write([live, other], live.parent / "compare.html"))
    read = [found for found in steps if found is not None]
    assert read, "some were read"
    assert min(read) > 0


def evaluated(path: Path, train: Train) -> float | None:
    finished = train(*CLOCK, "mode=test", f"ckpt_path={path}", check=False)
    if _is_to_be_tried_again(finished):
        return None
    results = json.loads((finished.run_dir / "results.json").read_text())
    assert results["test/apart"] == 0
    return results["test/steps"]


def begun(path: Path, train: Train) -> float | None:
    finished = train(*CLOCK, f"init_from={path}", "trainer.max_steps=1", check=False)
    return None if _is_to_be_tried_again(finished) else loaded(finished.run_dir / "checkpoints" / "last.ckpt")


def loaded(path: Path) -> float | None:
    try:
        hands = torch.cat(list(lightswitch.load(path).hands))
    except Refused as refused:
        if not str(refused).endswith("try again"):
            raise
        return None
    assert hands.min() == hands.max()
    return float(hands.min())


def _is_to_be_tried_again(finished: Finished) -> bool:
    if finished.returncode == 0:
        return False
    assert finished.returncode == 2, finished.err
    assert finished.err.rstrip().endswith("try again"), finished.err
    return True
