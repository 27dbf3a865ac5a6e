"""Readers of a run that goes on, and writes a checkpoint in each step: one of them, whole, or a line to try again."""

from __future__ import annotations

import contextlib
import io
import json
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import lightning.pytorch as pl
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lightswitch
from lightswitch.compare import page
from lightswitch.errors import Refused
from lightswitch.export.__main__ import main as export
from tests.runs import Finished, Train

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


def test_what_is_read_of_a_run_that_goes_on_is_whole(train: Train, tmp_path: Path) -> None:
    steps: list[float | None] = []
    other = train(*CLOCK, "trainer.max_steps=2").run_dir

    def read(processes: list[BaseProcess]) -> None:
        live = tmp_path / "2" / "runs" / "clock" / "live"
        while not (live / "checkpoints" / "best.ckpt").exists():
            assert processes[0].is_alive(), "it has begun"
            time.sleep(0.1)
        for name in ("best", "last"):
            path = live / "checkpoints" / f"{name}.ckpt"
            steps.extend((evaluated(path, train), begun(path, train), loaded(path)))
            steps.append(exported(path, tmp_path / f"{name}.safetensors"))
            list(page.write([live, other], tmp_path / "compare.html"))
        assert processes[0].is_alive(), "it went on meanwhile"
        processes[0].kill()

    train(*CLOCK, *LIVE, meanwhile=read, check=False)
    was_read = [found for found in steps if found is not None]
    assert was_read, "some were read"
    assert min(was_read) > 0


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


def exported(path: Path, file: Path) -> float | None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            export([str(path), "-o", str(file)])
    except SystemExit:
        line = said.getvalue().rstrip()
        assert line.startswith("error: "), line
        assert line.endswith("try again"), line
        assert not file.exists()
        return None
    hands = torch.cat(list(load_file(file).values()))
    assert hands.min() == hands.max()
    return float(hands.min())


def _is_to_be_tried_again(finished: Finished) -> bool:
    if finished.returncode == 0:
        return False
    assert finished.returncode == 2, finished.err
    assert finished.err.rstrip().endswith("try again"), finished.err
    return True
