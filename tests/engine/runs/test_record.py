"""What a start leaves in the run directory: nothing, until the run goes on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightswitch.runs import lock, record
from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.failures.pace import FAILS_ONCE

RUN = (*PLAIN, "name=plain", "run_id=mine", "trainer.accelerator=cpu", "trainer.val_check_interval=2")
MORE = "trainer.max_steps=4"
NO_DEVICE = "trainer.accelerator=gpu"
REFUSED = {
    "an unknown key": "trainer.max_stps=4",
    "a device that is not there": f"{MORE} {NO_DEVICE}",
    "resume from what is none": f"{MORE} resume=notes.txt",
    "a constructor's ValueError": f"{MORE} model._target_=tests.engine.runs.refusing.BadWidth",
    "a logger's ValueError": f"{MORE} +logger.lost._target_=tests.engine.runs.refusing.NoServer",
    "a model that does not like the data": f"{MORE} model._target_=tests.engine.runs.refusing.BadData",
    "another model's size": f"{MORE} model.width=32",
    "another optimizer": f"{MORE} model._target_=tests.engine.plain.SGDModel",
    "another seed": f"{MORE} seed=1",
    "other data": f"{MORE} data.samples=30",
    "a run id that is none": "run_id=../mine",
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
    assert {"crash", "tensorboard", "checkpoints", ".hydra", "train.log", "metrics.csv", "ended.json"} <= there
    return ended


def _state(run_dir: Path) -> dict[str, object]:
    """Of every file its bytes and when it was written; of every link where it leads."""
    found: dict[str, object] = {}
    for path in sorted(run_dir.rglob("*")):
        read = (lambda path: os.readlink(path)) if path.is_symlink() else Path.read_bytes
        if (path.is_file() or path.is_symlink()) and path.name != lock.FILE:
            found[str(path.relative_to(run_dir))] = (read(path), path.lstat().st_mtime_ns)
    return found


@pytest.mark.parametrize("request_", REFUSED)
def test_a_refused_start_leaves_every_byte_of_an_earlier_run(request_: str, earlier: Finished, train: Train) -> None:
    before = _state(earlier.run_dir)
    refused = train(*RUN, *REFUSED[request_].split(), folder=earlier.folder, check=False)
    assert (refused.returncode, len(refused.err.splitlines())) == (2, 1), refused.err
    assert _state(earlier.run_dir) == before
    assert not (earlier.run_dir / lock.FILE).exists()


@pytest.mark.parametrize(
    ("ranks", "request_"),
    [
        (2, "another model's size"),
        (0, "a model that does not like the data"),  # which starts them
    ],
)
def test_so_does_one_of_two_ranks(ranks: int, request_: str, earlier: Finished, train: Train) -> None:
    before = _state(earlier.run_dir)
    start = (*RUN, "strategy=ddp", *([] if ranks else ["trainer.devices=2"]), *REFUSED[request_].split())
    refused = train(*start, folder=earlier.folder, ranks=ranks, check=False)
    assert (refused.returncode, refused.err.count("error: ")) == (2, 1), refused.err
    assert _state(earlier.run_dir) == before


@pytest.fixture
def copied(earlier: Finished, tmp_path: Path) -> Finished:
    shutil.copytree(earlier.folder, tmp_path / "copied", symlinks=True)
    return Finished(0, "", "", tmp_path / "copied")


@pytest.mark.parametrize("is_marked", [True, False])  # as ended; else run.json has the step that it went on from
def test_a_run_that_has_lost_its_checkpoints_does_not_begin_anew_unasked(
    is_marked: bool, copied: Finished, train: Train
) -> None:
    if not is_marked:
        train(*RUN, MORE, folder=copied.folder)
        (copied.run_dir / "ended.json").unlink()
    (copied.run_dir / "checkpoints").rename(copied.folder / "moved")
    before = _state(copied.run_dir)
    refused = train(*RUN, "trainer.max_steps=6", folder=copied.folder, check=False)
    lost = "runs/plain/mine has trained at step 2, but has no checkpoint"
    how = "put its folder checkpoints back, resume another one with resume=PATH, or start over with resume=never"
    assert (refused.returncode, refused.err) == (2, f"error: {lost}; {how}\n")
    assert _state(copied.run_dir) == before
    train(*RUN, MORE, "resume=never", folder=copied.folder)


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "results.json", ".hydra/hydra.yaml"])
def test_a_directory_where_a_file_goes_is_refused_and_none_is_replaced(
    name: str, copied: Finished, train: Train
) -> None:
    (copied.run_dir / name).unlink()
    (copied.run_dir / name).mkdir()
    before = _state(copied.run_dir)
    refused = train(*RUN, MORE, folder=copied.folder, check=False)
    assert (refused.returncode, refused.err) == (2, _told(name, "a directory"))
    assert _state(copied.run_dir) == before


def _told(name: str, what: str) -> str:
    return (
        f"error: runs/plain/mine/{name} is {what}, expected a regular file with one hard link; put a copy there, or "
        "remove it\n"
    )


@pytest.mark.parametrize("name", [".lock", "train.log", "metrics.csv", "hparams.yaml", "results.json"])
def test_what_leads_out_of_the_run_directory_is_refused_and_left_as_it_is(
    name: str, copied: Finished, train: Train
) -> None:
    others = copied.folder / "others"
    kinds = {"a link": Path.symlink_to, "a file with several hard links": Path.hardlink_to, "a pipe": _mkfifo}
    for what, make in kinds.items():
        others.write_text("of somebody else")
        (copied.run_dir / name).unlink(missing_ok=True)
        make(copied.run_dir / name, others)
        refused = train(*RUN, MORE, folder=copied.folder, check=False)
        assert (refused.returncode, refused.err) == (2, _told(name, what))
        assert others.read_text() == "of somebody else"


def _mkfifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def test_a_file_that_is_written_anew_leaves_what_a_link_leads_to(copied: Finished, train: Train) -> None:
    (copied.folder / "others").write_text("of somebody else")
    (copied.run_dir / "config.yaml.partial").symlink_to(copied.folder / "others")
    train(*RUN, MORE, folder=copied.folder)
    assert (copied.folder / "others").read_text() == "of somebody else"


@pytest.mark.parametrize("in_the_way", ["config.yaml.partial", ".hydra"])
def test_so_is_what_is_in_the_way_of_writing_them(in_the_way: str, copied: Finished, train: Train) -> None:
    place = copied.run_dir / in_the_way
    if in_the_way == ".hydra":
        place.rename(copied.folder / "aside")
        place.touch()
    else:
        place.mkdir()
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


@pytest.fixture
def harmed(earlier: Finished, tmp_path: Path) -> Finished:
    """The same, with tensors that are not what was written."""
    shutil.copytree(earlier.folder, tmp_path / "harmed", symlinks=True)
    for path in tmp_path.glob("harmed/runs/*/mine/checkpoints/*/*.bin"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    return Finished(0, "", "", tmp_path / "harmed")


def test_a_start_that_finds_only_harmed_checkpoints_leaves_them(harmed: Finished, train: Train) -> None:
    before = _state(harmed.run_dir)
    refused = train(*RUN, MORE, folder=harmed.folder, check=False)
    assert refused.returncode == 2
    assert "differs from its checksum" in refused.err
    assert _state(harmed.run_dir) == before


def test_a_start_while_another_writes_leaves_its_files(earlier: Finished, train: Train) -> None:
    before = _state(earlier.run_dir)
    held = lock.take(earlier.run_dir, on_lost=print)
    refused = train(*RUN, MORE, folder=earlier.folder, check=False)
    by_ranks = train(*RUN, MORE, "strategy=ddp", ranks=2, folder=earlier.folder, check=False)
    held.release()
    told = f"error: runs/plain/mine is being written by process {os.getpid()} on {os.uname().nodename}, since "
    for start in (refused, by_ranks):
        assert (start.returncode, start.err.count("\n")) == (2, 1), start.err
        assert start.err.startswith(told)
    assert _state(earlier.run_dir) == before


@pytest.mark.nightly
def test_a_start_that_goes_on_keeps_the_log_of_what_it_said_first(earlier: Finished, train: Train) -> None:
    for strategy in (
        "single",
        "ddp trainer.devices=2",
        "ddp trainer.devices=2 data._target_=tests.engine.runs.refusing.NoTestData",
    ):
        steps = 10 + len(strategy)
        size = (earlier.run_dir / "train.log").stat().st_size
        run = train(*RUN, *f"strategy={strategy} trainer.max_steps={steps}".split(), folder=earlier.folder)
        logged = (earlier.run_dir / "train.log").read_text()[size:]
        told = [line.split(": ", 1)[1] for line in logged.splitlines() if " INFO lightswitch." in line]
        assert len(told) > 3
        assert [line for line in run.out.splitlines() if line and line in told] == [line for line in told if line]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to someone else")
def test_the_commit_of_a_checkout_of_someone_else_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git[:3], "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=All"], check=True)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert re.fullmatch("[0-9a-f]{40}", record.git_of_code("rev-parse", "HEAD") or "none")
