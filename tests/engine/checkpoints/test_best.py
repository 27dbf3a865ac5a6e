"""What a checkpoint says of other checkpoints is believed within the run's own folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightswitch.checkpoints.writing import trusted_states
from tests.engine.checkpoints import hostile
from tests.engine.conftest import PLAIN, Finished, Train, once
from tests.night import at_night

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
@pytest.mark.parametrize("how", ["a link", *at_night("..")])
def test_no_path_from_a_checkpoint_is_removed_outside_of_the_run(how: str, again: Path, train: Train) -> None:
    victim = hostile.ours(again.parent / "victim")  # a directory of ours: another run's checkpoint
    path = again / "checkpoints" / ".." / ".." / "victim"
    if how == "a link":
        (again / "checkpoints" / "link").symlink_to(victim.parent)
        path = again / "checkpoints" / "link" / "victim"
    say(again, kth_best_model_path=str(path), best_k_models={str(path): torch.tensor(9.0)})
    resumed = train(*RUN, "trainer.max_steps=8", folder=again.parents[2])
    assert "resumes    runs/plainmodel/mine/checkpoints/" in resumed.out
    assert (victim / "trainer.pt").exists()
    assert (again / "checkpoints" / "best.ckpt").exists()


def test_the_test_after_fit_reads_no_checkpoint_of_another_run(again: Path, train: Train) -> None:
    elsewhere = hostile.ours(again.parent / "elsewhere.ckpt")
    say(again, best_model_path=str(elsewhere))
    resumed = train(*RUN, "trainer.max_steps=5", "trainer.val_check_interval=100", folder=again.parents[2])
    assert "tests      the last weights" in resumed.out


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


OUTSIDE = ["/", "/etc", "..", "../x", "checkpoints/../../x", "checkpoints", "", "checkpoints/a\0b", 7, None]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("name", ["best_model_path", "last_model_path", "kth_best_model_path"])
def test_a_path_that_leads_elsewhere_makes_all_of_it_unknown(name: str, path: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "checkpoints", monitor="val/loss")
    if isinstance(path, str) and path:
        path = str(tmp_path / path)
    good = str(tmp_path / "checkpoints" / "best.ckpt")
    state = callback.state_dict() | {"best_k_models": {good: torch.tensor(1.0)}, "kth_best_model_path": good}
    both = {callback.state_key: {**state, "best_model_path": good}, "other": 3}
    states = trusted_states(both, [callback], is_of_run=False, is_best=_is_there)
    assert states == {callback.state_key: {**state, "best_model_path": good}, "other": 3}
    odd = {callback.state_key: {**state, "best_model_path": good, name: path}}
    found = trusted_states(odd, [callback], is_of_run=False, is_best=_is_there)
    if path == "" and name != "kth_best_model_path":
        return  # as it is before the first one
    assert found[callback.state_key] == _empty(callback)


def _is_there(path: Path) -> bool:
    return path.name == "best.ckpt"


def _empty(callback: ModelCheckpoint) -> dict[str, Any]:
    return {"dirpath": callback.dirpath, "best_model_score": None, "best_model_path": ""}


@pytest.mark.parametrize("inner", ["best.ckpt", "epoch=1/best.ckpt"])
def test_the_best_of_a_run_that_was_moved_is_where_it_is_now(inner: str, tmp_path: Path) -> None:
    before = ModelCheckpoint(tmp_path / "before", monitor="val/loss")
    callback = ModelCheckpoint(tmp_path / "now", monitor="val/loss")
    path, score = str(tmp_path / "before" / inner), torch.tensor(1.0)
    state = before.state_dict() | {"best_model_path": path, "best_k_models": {path: score}, "kth_best_model_path": path}
    now = str(tmp_path / "now" / inner)
    moved = trusted_states({callback.state_key: state}, [callback], is_of_run=True, is_best=_is_there)
    assert moved[callback.state_key] == state | {
        **{"dirpath": callback.dirpath, "best_model_path": now},
        **{"best_k_models": {now: score}, "kth_best_model_path": now},
    }
    of_another = trusted_states({callback.state_key: state}, [callback], is_of_run=False, is_best=_is_there)
    gone = trusted_states({callback.state_key: state}, [callback], is_of_run=True, is_best=lambda path: False)
    assert of_another[callback.state_key] == gone[callback.state_key] == _empty(callback)
