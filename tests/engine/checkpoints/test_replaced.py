"""A checkpoint of a run that goes on, read while the run replaces it: one, whole, or a line that says to try again."""

from __future__ import annotations

import contextlib
import io
import json
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lightswitch
from lightswitch.checkpoints import directory
from lightswitch.checkpoints.last import position_of
from lightswitch.checkpoints.weight_files import Weights
from lightswitch.compare import page
from lightswitch.errors import Refused, UnfitCheckpoint
from lightswitch.export.__main__ import main as export
from tests.runs import Finished, Train


def _write(path: Path, value: float) -> None:
    tensors = {f"model.{name}": torch.full((2,), value) for name in ("a", "b", "c")}
    directory.write(path, tensors, {"hyper_parameters": {}}, None)


def test_a_checkpoint_that_is_replaced_between_two_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    _write(path, 1.0)
    weights = Weights(path)
    weights.read(["a"])
    _write(path, 2.0)
    with pytest.raises(UnfitCheckpoint, match=r"a run in progress replaced or removed it during the read; try again"):
        weights.read(["b", "c"])


def test_a_checkpoint_that_is_removed_between_two_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_1.ckpt"
    _write(path, 1.0)
    weights = Weights(path)
    directory.remove(path)
    with pytest.raises(UnfitCheckpoint, match="try again"):
        weights.read(["a"])


def test_a_link_that_is_moved_between_two_reads_is_read_to_the_end_where_it_led(tmp_path: Path) -> None:
    _write(tmp_path / "step_1.ckpt", 1.0)
    _write(tmp_path / "step_2.ckpt", 2.0)
    link = tmp_path / "last.ckpt"
    link.symlink_to("step_1.ckpt")
    weights = Weights(link)
    link.unlink()
    link.symlink_to("step_2.ckpt")
    assert torch.cat(list(weights.read(["a", "b", "c"]).values())).eq(1).all()


def test_what_a_killed_process_was_writing_is_finished_or_removed(tmp_path: Path) -> None:
    for name in ("best.ckpt.previous", "step_1.ckpt", "step_1.ckpt.previous", "step_2.ckpt.partial", "own.ckpt.bak"):
        _write(tmp_path / name, 1.0)
    (tmp_path / "step_3.ckpt.partial").mkdir()  # killed before the mark
    (tmp_path / "last.ckpt.partial").symlink_to("step_1.ckpt")
    directory.finish_changes(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "step_1.ckpt", "own.ckpt.bak"}
    assert position_of(tmp_path / "best.ckpt") is None


def test_a_checkpoint_is_whole_or_gone_however_far_its_removal_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step_1.ckpt"
    _write(path, 1.0)
    files, seen = {file.name for file in path.iterdir()}, list[bool]()
    unlink = Path.unlink

    def looks(file: Path, missing_ok: bool = False) -> None:
        seen.append(not path.exists() or {other.name for other in path.iterdir()} == files)
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", looks)
    directory.remove(path)
    assert len(seen) >= len(files) - 1
    assert all(seen)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_being_exchanged_is_to_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    _write(path, 1.0)
    path.rename(directory.beside_of(path, "previous"))
    with pytest.raises(UnfitCheckpoint, match="try again"):
        Weights(path)


# Readers of a run that goes on, and writes a checkpoint in each step: one of them, whole, or a line to try again

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


@pytest.mark.nightly
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
