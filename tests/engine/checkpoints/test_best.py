"""A resumed run remembers its best checkpoint, also in a directory that was moved, and none of another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightswitch.checkpoints.portable import _best_of
from tests.engine.checkpoints import hostile
from tests.engine.conftest import PLAIN, Finished, Train, once

RUN = (*PLAIN, "trainer.accelerator=cpu", "run_id=mine", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1")


trained = once(*RUN, "trainer.max_steps=4")


@pytest.fixture
def again(trained: Finished, tmp_path: Path) -> Path:
    """A copy of the run: its directory."""
    shutil.copytree(trained.folder, tmp_path / "again", symlinks=True)
    return tmp_path / "again" / trained.run_dir.relative_to(trained.folder)


def say(run_dir: Path, folder: Path | None = None, score: float = 9.0, **said: Any) -> None:
    """In all checkpoints of a run, of the best ones, as a run in ``folder`` or whoever writes them could."""
    folder = (folder or run_dir) / "checkpoints"
    best = str(folder / "best.ckpt")
    told = dict.fromkeys(("best_model_path", "last_model_path", "kth_best_model_path"), best)
    told |= {"dirpath": str(folder), "best_k_models": {best: torch.tensor(score)}, **said}
    for path in (run_dir / "checkpoints").glob("*.ckpt"):
        if not path.is_symlink():
            state = torch.load(path / "trainer.pt")
            (key,) = (key for key in state["callbacks"] if key.startswith("BestCheckpoint"))
            state["callbacks"][key] |= told
            torch.save(state, path / "trainer.pt")
            hostile.sign(path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mine", "moved"])
def test_a_run_remembers_its_best_where_it_is_now(name: str, trained: Finished, tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "again" / "runs/plainmodel" / name
    shutil.copytree(trained.run_dir, run_dir, symlinks=True)
    folder = trained.run_dir if name == "moved" else run_dir
    say(run_dir, folder, score=-1.0, best_model_score=torch.tensor(-1.0))
    before = (run_dir / "checkpoints" / "best.ckpt" / "SHA256SUMS").read_text()
    resumed = train(*RUN, f"run_id={name}", "trainer.max_steps=8", folder=tmp_path / "again")
    assert f"tests      runs/plainmodel/{name}/checkpoints/best.ckpt" in resumed.out
    assert (run_dir / "checkpoints" / "best.ckpt" / "SHA256SUMS").read_text() == before


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
