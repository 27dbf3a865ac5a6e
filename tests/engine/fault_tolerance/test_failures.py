"""Whatever happens to a rank, all end soon, and the user reads which rank failed, and of what."""

from __future__ import annotations

import os
import re
import socket

import pytest

from tests.engine.conftest import PLAIN_DATA, PLAIN_MODEL, Finished, Train, runs_in
from tests.engine.fault_tolerance.failing import FAILING_MODEL

RUN = (
    *(FAILING_MODEL, PLAIN_DATA, "run_id=mine"),
    *("strategy=ddp", "trainer.accelerator=cpu", "trainer.max_steps=4"),
)
# Beside the tests of ranks that are killed, as the kernel's count of processes killed for memory is the machine's.
with_cgroups = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK), reason="needs root, and control groups' first version"
)


def _failed(train: Train, *arguments: str) -> Finished:
    finished = train(*RUN, *arguments, ranks=2, check=False)
    assert finished.returncode != 0
    return finished


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return _failed(runs_in(tmp_path_factory.mktemp("raised")), "model.how=raises")


def test_of_an_error_one_rank_alone_speaks_and_it_is_the_right_one(raised: Finished) -> None:
    first, *traceback, said, where = raised.err.splitlines()
    assert first.startswith("rank 1 of 2 on ")
    assert first.endswith(" failed: RuntimeError: this is the bug")
    assert traceback[0] == "Traceback (most recent call last):"
    assert said == "RuntimeError: this is the bug"
    assert where.startswith("crash report: runs/failingmodel/mine/crash/")
    assert raised.returncode == 1


@with_cgroups
def test_a_loaders_worker_that_was_killed_for_memory_is_named_and_so_is_its_node(train: Train) -> None:
    data = ("data._target_=tests.engine.fault_tolerance.raising.RaisingData", "data.where=sample", "data.workers=1")
    of_model = (PLAIN_MODEL, "strategy=single", "data.error='out of memory'")
    failed = train(*RUN, *of_model, *data, check=False)
    assert failed.returncode == 1
    assert re.search(r"DataLoader worker .* SIGKILL|by signal: Killed", failed.err)
    assert f"; {socket.gethostname()} ran out of memory\n" in failed.err


@with_cgroups
def test_another_process_that_the_kernel_killed_for_memory_is_not_blamed_for_a_bug(train: Train) -> None:
    failed = _failed(train, "model.how='sees another run out of memory'")
    assert failed.err.splitlines()[0].endswith(" failed: RuntimeError: this is the bug")


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_of_ranks_that_python_forks_too(how: str, train: Train) -> None:
    failed = train(*RUN, "strategy=ddp_fork", "trainer.devices=2", f"model.how='{how}'", check=False)
    said = {"raises": r"RuntimeError: this is the bug", "is killed": r"process \d+ ended with.*"}[how]
    assert re.fullmatch(rf"rank 1 (of 2 )?on \S+ failed: {said}", failed.err.splitlines()[0])
    assert failed.err.count("Traceback") == (how == "raises")
    assert failed.returncode == 1


def test_what_a_user_can_mend_is_told_once_and_leaves_no_crash_report(train: Train) -> None:
    failed = _failed(train, "model.how=refuses", "model.stage=setup", "model.rank=1")
    assert failed.err == "error: model: this is no batch of mine\n"
    assert failed.returncode == 2
    assert not (failed.run_dir / "crash").exists()
    assert (failed.run_dir / "train.log").read_text().count("Traceback") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named(rank: int, train: Train) -> None:
    failed = _failed(train, "model.how='is killed'", f"model.rank={rank}")
    assert failed.err.splitlines()[0].startswith(f"rank {rank} of 2 on ")
    assert "it was killed, or crashed outside of Python" in failed.err.splitlines()[0]
    assert "Traceback" not in failed.err


@pytest.mark.parametrize("stage", ["training_step", "test_step"])
def test_a_rank_that_hangs_is_found_with_the_line_it_stands_at(stage: str, train: Train) -> None:
    failed = _failed(train, "model.how=hangs", f"model.stage={stage}", "watch.hung_after_seconds=5")
    line = failed.err.splitlines()[0]
    assert line.startswith("rank 1 of 2 on ")
    assert "hangs at" in line
    assert "in fail: time.sleep(1000)" in line
    assert failed.returncode == 1


def test_a_rank_that_others_wait_for_is_found_wherever_they_stand(train: Train) -> None:
    """As under NCCL, where ranks enter a collective and go on."""
    model = "model._target_=tests.engine.fault_tolerance.asynchronous.AsynchronousModel"
    failed = train(model, *RUN[1:], "watch.hung_after_seconds=5", ranks=2, check=False)
    line = failed.err.splitlines()[0]
    assert line.startswith("rank 1 of 2 on ")
    assert "in training_step: time.sleep(1000)" in line


def test_the_crash_report_holds_what_each_rank_knows(raised: Finished) -> None:
    (report,) = (raised.run_dir / "crash").iterdir()
    assert (report / "failure.txt").read_text().splitlines()[-1] == "RuntimeError: this is the bug"
    for rank in (0, 1):
        told = (report / f"rank_{rank}.txt").read_text()
        assert told.startswith(f"rank {rank} of 2 on ")
        assert "epoch 0, step 2, micro batch 0: samples " in told
        assert "thread MainThread:" in told
        assert f"\nRANK={rank}\n" in told


def test_a_run_of_one_process_keeps_its_traceback_and_has_a_crash_report(train: Train) -> None:
    failed = train(*RUN, "strategy=single", "model.how=raises", "model.rank=0", check=False)
    assert failed.returncode == 1
    assert "RuntimeError: this is the bug" in failed.err.splitlines()
    (report,) = (failed.run_dir / "crash").iterdir()
    assert "RuntimeError: this is the bug" in (report / "rank_0.txt").read_text()


def test_a_run_that_ends_as_it_should_says_nothing(train: Train) -> None:
    finished = train(*RUN, "model.how=nothing", ranks=2)
    assert finished.err == ""
    assert not (finished.run_dir / "crash").exists()
