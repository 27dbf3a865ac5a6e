"""What a start leaves in the run directory: nothing, until the run goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightswitch.errors import Refused
from lightswitch.runs import claim, record
from lightswitch.runs.record import log_hyperparameters
from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.failures.pace import FAILS_ONCE
from tests.engine.monitoring.tiny import Regression, loader, trainer
from tests.night import at_night

RUN = (*PLAIN, "name=plain", "run_id=mine", "trainer.accelerator=cpu", "trainer.val_check_interval=2")
MORE = "trainer.max_steps=4"
WIDER = f"{MORE} model.width=32"
BAD_DATA = f"{MORE} model._target_=tests.engine.runs.refusing.BadData"
REFUSED = {
    "an unknown key": "trainer.max_stps=4",
    "a constructor's ValueError": f"{MORE} model._target_=tests.engine.runs.refusing.BadWidth",
    "a model that does not like the data": BAD_DATA,
    "other data": f"{MORE} data.samples=30",
}
REFUSED_AT_NIGHT = {
    "a run id that is none": "run_id=../mine",
    "two ranks that find out in setup": f"{BAD_DATA} strategy=ddp trainer.devices=2",
    "another model's size": WIDER,
    "a device that is not there": f"{MORE} trainer.accelerator=gpu",
    "resume from what is none": f"{MORE} resume=notes.txt",
    "another optimizer": f"{MORE} model._target_=tests.engine.plain.SGDModel",
    "another seed": f"{MORE} seed=1",
    "two ranks and another model's size": f"{WIDER} strategy=ddp trainer.devices=2",
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that has failed once, gone on, and ended."""
    train = runs_in(tmp_path_factory.mktemp("earlier"))
    fails = (FAILS_ONCE, "callbacks.fails.step=1")
    failed = train(*RUN, *fails, "trainer.max_steps=2", check=False)
    ended = train(*RUN, "trainer.max_steps=2", folder=failed.folder)
    (ended.folder / "notes.txt").write_text("no checkpoint")
    there = {path.name for path in ended.run_dir.iterdir()}
    assert {"crash", "tensorboard", "checkpoints", ".hydra", "train.log", "metrics.csv", "run.json"} <= there
    return ended


def _state(run_dir: Path) -> dict[str, object]:
    """Of every file its bytes and when it was written; of every link where it leads."""
    found: dict[str, object] = {}
    for path in sorted(run_dir.rglob("*")):
        read = (lambda path: os.readlink(path)) if path.is_symlink() else Path.read_bytes
        if (path.is_file() or path.is_symlink()) and path.name != claim.LOCK:
            found[str(path.relative_to(run_dir))] = (read(path), path.lstat().st_mtime_ns)
    return found


@pytest.mark.parametrize("request_", [*REFUSED, *at_night(*REFUSED_AT_NIGHT)])
def test_a_refused_start_leaves_every_byte_of_an_earlier_run(request_: str, earlier: Finished, train: Train) -> None:
    before = _state(earlier.run_dir)
    words = (REFUSED | REFUSED_AT_NIGHT)[request_].split()
    refused = train(*RUN, *words, folder=earlier.folder, check=False)
    assert (refused.returncode, refused.err.count("error: ")) == (2, 1), refused.err
    assert _state(earlier.run_dir) == before
    assert not (earlier.run_dir / claim.LOCK).exists()


@pytest.fixture
def copied(earlier: Finished, tmp_path: Path) -> Finished:
    shutil.copytree(earlier.folder, tmp_path / "copied", symlinks=True)
    return Finished(0, "", "", tmp_path / "copied")


@pytest.mark.parametrize("is_marked", [True, *at_night(False)])  # as ended; else its starts have the step
def test_a_run_that_has_lost_its_checkpoints_does_not_begin_anew_unasked(
    is_marked: bool, copied: Finished, train: Train
) -> None:
    if not is_marked:
        train(*RUN, MORE, folder=copied.folder)
        record = json.loads((copied.run_dir / "run.json").read_text())
        (copied.run_dir / "run.json").write_text(json.dumps({**record, "ended": None}))
    (copied.run_dir / "checkpoints").rename(copied.folder / "moved")
    before = _state(copied.run_dir)
    refused = train(*RUN, "trainer.max_steps=6", folder=copied.folder, check=False)
    lost = "runs/plain/mine has trained at step 2, but has no checkpoint"
    how = "put its folder checkpoints back, resume another one with resume=PATH, or start over with resume=never"
    assert (refused.returncode, refused.err) == (2, f"error: {lost}; {how}\n")
    assert _state(copied.run_dir) == before
    train(*RUN, MORE, "resume=never", folder=copied.folder)


@pytest.mark.nightly
def test_what_is_in_the_way_of_writing_them_is_refused(copied: Finished, train: Train) -> None:
    (copied.run_dir / "config.yaml.partial").mkdir()
    before = _state(copied.run_dir)
    refused = train(*RUN, MORE, folder=copied.folder, check=False)
    assert (refused.returncode, refused.err.count("\n")) == (2, 1), refused.err
    assert refused.err.startswith("error: the run directory can't be written: ")
    assert _state(copied.run_dir) == before


def test_a_logger_that_can_not_connect_leaves_an_earlier_runs_files(copied: Finished, train: Train) -> None:
    """It finds out when it is opened, as W&B does without a key."""
    before = _state(copied.run_dir)
    lost = "+logger.lost._target_=tests.engine.runs.refusing.NoKey"
    failed = train(*RUN, MORE, lost, "resume=never", folder=copied.folder, check=False)
    assert (failed.returncode, "RuntimeError: no API key configured" in failed.err) == (1, True), failed.err
    after = _state(copied.run_dir)
    told = {path for path in after.keys() | before.keys() if after.get(path) != before.get(path)}
    assert {path.partition("/")[0] for path in told} <= {"crash", "train.log"}, told


def test_a_start_that_finds_only_harmed_checkpoints_leaves_them(copied: Finished, train: Train) -> None:
    for path in copied.run_dir.glob("checkpoints/*/*.bin"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    before = _state(copied.run_dir)
    refused = train(*RUN, MORE, folder=copied.folder, check=False)
    assert (refused.returncode, "differs from its checksum" in refused.err) == (2, True)
    assert _state(copied.run_dir) == before


def test_a_start_while_another_writes_leaves_its_files(earlier: Finished, train: Train) -> None:
    before = _state(earlier.run_dir)
    release = claim.lock(earlier.run_dir)
    refused = train(*RUN, MORE, folder=earlier.folder, check=False)
    by_ranks = train(*RUN, MORE, "strategy=ddp", ranks=2, folder=earlier.folder, check=False)
    release()
    told = f"error: runs/plain/mine is being written by process {os.getpid()} on {os.uname().nodename}, since "
    for start in (refused, by_ranks):
        assert (start.returncode, start.err.count("\n")) == (2, 1), start.err
        assert start.err.startswith(told)
    assert _state(earlier.run_dir) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to someone else")
def test_the_commit_of_a_checkout_of_someone_else_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git[:3], "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=All"], check=True)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert re.fullmatch("[0-9a-f]{40}", record.git_of_code("rev-parse", "HEAD") or "none")


# Loggers are sent the arguments that module and data have saved, without what came from the environment


CONFIG = {"model": {"width": 8, "token": "${oc.env:TOKEN}"}, "sizes": {"devices": 2}}  # as it is written


class Saving(Regression):
    def __init__(self, width: int, token: str = "hunter2!") -> None:
        super().__init__()
        self.save_hyperparameters()


class SavingData(LightningDataModule):
    def __init__(self, width: int, path: str = "data") -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(8)


class Logging(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_hyperparameters(trainer, CONFIG)


def _logged(folder: Path, module: LightningModule, data: LightningDataModule) -> dict[str, Any]:
    options = {"max_steps": 1, "log_every_n_steps": 1, "enable_autolog_hparams": False}
    trainer(folder, callbacks=[Logging()], logger=CSVLogger(folder, "", ""), **options).fit(module, datamodule=data)
    logged: dict[str, Any] = yaml.safe_load((folder / "hparams.yaml").read_text())
    return logged


def test_arguments_of_module_and_data_are_logged_and_the_module_keeps_its_own(tmp_path: Path) -> None:
    module = Saving(8)
    saved = {"width": 8, "token": "${oc.env:TOKEN}", "path": "data"}
    assert _logged(tmp_path, module, SavingData(8)) == {**saved, **CONFIG}
    assert module.hparams.token == "hunter2!"


def test_an_argument_that_has_two_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="model and data have both saved width, with different values"):
        _logged(tmp_path, Saving(8), SavingData(9))
