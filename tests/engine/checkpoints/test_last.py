"""last.ckpt: what a run goes on from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightswitch.checkpoints.directory import read_state
from lightswitch.checkpoints.last import newest
from lightswitch.checkpoints.portable import _best_of
from lightswitch.regular_files import MARK
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainModel
from tests.night import at_night

Disk = Callable[[str], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """`disk("300k")`: a folder on a file system of its own, of that size."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder), capture_output=True)
        if done.returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(("umount", "--lazy", folder), check=True)


HERE = "tests.engine.checkpoints.test_last"
RUN = (
    *PLAIN,
    "trainer.accelerator=cpu",
    "run_id=mine",
    "trainer.val_check_interval=100",
    "trainer.limit_val_batches=0",
)


class Watch(pl.Callback):
    """Writes which checkpoint is the last, and which are whole, at each step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        link = self.folder / "last.ckpt"
        target = os.readlink(link) if os.path.lexists(link) else None
        whole = (path.parent.name for path in self.folder.glob("*/SHA256SUMS"))
        with open("seen.txt", "a") as file:
            print(trainer.global_step, target, *whole, file=file)


class Full(pl.Callback):
    """Fills the disk but for some bytes, once the first checkpoint is written."""

    def __init__(self, folder: str, left: int) -> None:
        self.folder, self.left = folder, left

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            trainer.strategy._writer.wait()
            disk = os.statvfs(self.folder)
            Path(self.folder, "ballast").write_bytes(bytes(disk.f_bavail * disk.f_frsize - self.left))


def test_last_points_to_the_newest_and_older_ones_go(train: Train, tmp_path: Path) -> None:
    watch = (
        f"callbacks.watch._target_={__name__}.Watch",
        "callbacks.watch.folder=${hydra:runtime.output_dir}/checkpoints",
    )
    run = train(*RUN, *watch, "trainer.max_steps=8", "callbacks.last_checkpoint.every_n_steps=2", folder=tmp_path)
    for line in (tmp_path / "seen.txt").read_text().splitlines():
        step, target, *whole = line.split()
        assert target == "None" or target in whole, line  # it is written while training goes on
        assert target == "None" or 0 <= int(step) - int(target[5:-5]) <= 4
    checkpoints = run.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["last.ckpt", "step_6.ckpt", "step_8.ckpt"]
    assert os.readlink(checkpoints / "last.ckpt") == "step_8.ckpt"
    assert read_state(checkpoints / "last.ckpt")["global_step"] == 8


class ThreeSteps(PlainModel):
    """Steps its optimizer three times a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        for _ in range(3):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


def test_a_batch_of_several_steps_is_saved_after_its_last(train: Train) -> None:
    long = ("trainer.max_steps=30", "callbacks.last_checkpoint.every_n_steps=5", "callbacks.last_checkpoint.keep=9")
    run = train(*RUN, f"model._target_={HERE}.ThreeSteps", *long, "data.samples=3000")
    saved = {int(path.stem.removeprefix("step_")) for path in (run.run_dir / "checkpoints").glob("step_*")}
    assert saved == {6, 12, 15, 21, 27, 30}


@pytest.mark.nightly
def test_those_to_keep_stay_for_ever(train: Train) -> None:
    every = ("callbacks.last_checkpoint.every_n_steps=1", "callbacks.last_checkpoint.keep_every_n_steps=3")
    run = train(*RUN, "trainer.max_steps=8", *every, "callbacks.last_checkpoint.keep=1", "micro_batch_size=16")
    checkpoints = run.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_3.ckpt", "step_6.ckpt", "step_8.ckpt"]
    assert read_state(checkpoints / "last.ckpt")["global_step"] == 8


@pytest.mark.parametrize(("strategy", "name"), [("single", "best"), *at_night(("fsdp", "low"))])
def test_the_best_few_are_kept_and_the_best_has_the_name_of_the_one(strategy: str, name: str, train: Train) -> None:
    few = ("callbacks.best_checkpoint.save_top_k=2", "model.lr=1.0", f"strategy={strategy}")
    if name == "low":
        few += ("callbacks.best_checkpoint.filename='low_{step}'",)
    steps = ("trainer.max_steps=20", "trainer.val_check_interval=5")
    run = train(*RUN[:-2], *few, *steps, ranks=2 if strategy == "fsdp" else 0)
    losses = run.column("val/loss")
    two = sorted(losses, key=lambda step: losses[step])[:2]
    assert two[0] != max(losses), "the last is the best, whatever is linked"
    checkpoints, best = run.run_dir / "checkpoints", f"{name}_step={two[0] + 1}.ckpt"
    kept = {path.name for path in checkpoints.iterdir() if path.name.startswith((name, "best"))}
    assert kept == {"best.ckpt", best, f"{name}_step={two[1] + 1}.ckpt"}
    assert os.readlink(checkpoints / "best.ckpt") == best
    assert re.search(rf"^tests      \S+/{best}$", run.out, re.MULTILINE)
    assert re.search(r"^evaluate .*/checkpoints/best\.ckpt$", run.out, re.MULTILINE)


LARGE = ("model.width=20000", "trainer.max_steps=8", "callbacks.last_checkpoint.every_n_steps=2")  # 1.7 MB with Adam's
REASON = r"the checkpoint could not be written: rank [01]: (\[Errno 28\]|\S+:) No space left on device"


@pytest.mark.parametrize("ranks", [2, *at_night(0)])
def test_a_full_disk_is_called_so_nothing_stays_of_what_it_did_not_take_and_the_older_checkpoint_does(
    ranks: int, disk: Disk, train: Train
) -> None:
    folder = disk("9m")
    fill = (f"callbacks.fill._target_={__name__}.Full", f"callbacks.fill.folder={folder}", "callbacks.fill.left=200000")
    run = train(*RUN, *LARGE, *fill, "strategy=ddp", folder=folder, ranks=ranks, check=False)
    assert run.returncode == 2
    assert re.search(f"{REASON}; ", run.out)
    assert "; training continues, and earlier checkpoints are kept" in run.out
    # a checkpoint, or the metrics, whichever is written first once nothing is left
    assert re.search(f"^error: ({REASON}|the disk is full: )", run.err, re.MULTILINE)
    assert "Traceback" not in run.err
    checkpoints = run.run_dir / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"last.ckpt", "step_2.ckpt"}
    assert os.readlink(checkpoints / "last.ckpt") == "step_2.ckpt"
    found = newest(run.run_dir)
    assert found is not None
    assert found[1].global_step == 2
    again = train(*RUN, *LARGE, folder=folder, check=False)
    full = r"the run directory \S+/mine can't be written: the disk is full, \d+ KB are free"
    assert re.fullmatch(full, again.refusal)


@pytest.mark.parametrize("logger", ["tensorboard", *at_night("csv")])  # the first writes in a thread of its own
def test_a_disk_that_is_full_to_the_last_byte_ends_a_run_in_a_line(logger: str, disk: Disk, train: Train) -> None:
    folder = disk("9m")
    fill = (f"callbacks.fill._target_={__name__}.Full", f"callbacks.fill.folder={folder}", "callbacks.fill.left=0")
    run = train(*RUN, *LARGE, *fill, f"logger={logger}", "trainer.log_every_n_steps=1", folder=folder, check=False)
    assert run.returncode == 2
    full = r"error: the disk is full: No space left on device: \S*runs/\S+; fix it, then start the run again"
    assert re.fullmatch(f"{full}|error: {REASON}.*", run.err.splitlines()[-1])
    assert "Traceback" not in run.err


# What stands beside the checkpoints of a run


@pytest.mark.nightly
def test_what_stands_beside_them_stays_and_does_not_keep_old_ones(train: Train, tmp_path: Path) -> None:
    """As an earlier version wrote it, or the user put it there."""
    every = ("callbacks.last_checkpoint.every_n_steps=2", "trainer.val_check_interval=2")
    first = train(*RUN, *every, "trainer.max_steps=4", folder=tmp_path)
    checkpoints = first.run_dir / "checkpoints"
    shutil.copytree(checkpoints / "step_2.ckpt", checkpoints / "step_2_backup.ckpt")
    (checkpoints / "step_2.ckpt" / MARK).unlink()
    for name in ("step_.ckpt", "step_²0.ckpt", "a\nb.ckpt", "step_7.ckpt.partial"):
        (checkpoints / name).mkdir()
    (checkpoints / "step_7.ckpt.partial" / "mine.txt").touch()
    (checkpoints / "step_1.ckpt").symlink_to("nowhere")
    (checkpoints / "step_3.ckpt").write_text("a note")
    beside = set(checkpoints.iterdir()) - {checkpoints / "step_4.ckpt"}
    run = train(*RUN, *every, "trainer.max_steps=8", folder=tmp_path)
    assert set(checkpoints.iterdir()) == beside | {checkpoints / f"step_{step}.ckpt" for step in (6, 8)}
    assert "step_2.ckpt was not removed: it has no .lightswitch, so lightswitch did not create it" in run.out
    assert "resumes    runs/plainmodel/mine/checkpoints/step_4.ckpt" in run.out


# A resumed run remembers its best checkpoint, also in a directory that was moved, and none of another run


@pytest.mark.parametrize("inner", ["best.ckpt", "epoch=1/best.ckpt"])
def test_the_best_of_a_run_that_was_moved_is_where_it_is_now(inner: str, tmp_path: Path) -> None:
    before = ModelCheckpoint(tmp_path / "before", monitor="val/loss")
    callback = ModelCheckpoint(tmp_path / "now", monitor="val/loss")
    path, score = str(tmp_path / "before" / inner), torch.tensor(1.0)
    state = before.state_dict() | {"best_model_path": path, "best_k_models": {path: score}, "kth_best_model_path": path}
    now = str(tmp_path / "now" / inner)
    assert _best_of(callback, state, is_of_run=True) == state | {
        **{"dirpath": callback.dirpath, "best_model_path": now},
        **{"best_k_models": {now: score}, "kth_best_model_path": now},
    }
    empty = {"dirpath": callback.dirpath, "best_model_score": None, "best_model_path": ""}
    assert _best_of(callback, state, is_of_run=False) == empty
