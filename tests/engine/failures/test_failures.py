"""Whatever happens to a rank, all end soon, and the user reads which rank failed, and of what."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from tests.engine.conftest import PLAIN_DATA, PLAIN_MODEL, Finished, Train
from tests.engine.failures.failing import FAILING_DATA, FAILING_MODEL
from tests.night import at_night

RUN = (
    *(FAILING_MODEL, PLAIN_DATA, "run_id=mine"),
    *("strategy=ddp", "trainer.accelerator=cpu", "trainer.max_steps=4"),
)
HUNG = "watch.hung_after_seconds=20"  # a busy machine may begin no batch for some seconds, between fit and test
# Beside the tests of ranks that are killed, as the kernel's count of processes killed for memory is the machine's.
with_cgroups = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK), reason="needs root, and control groups' first version"
)


def _failed(train: Train, *arguments: str) -> Finished:
    finished = train(*RUN, *arguments, ranks=2, check=False)
    assert finished.returncode != 0
    return finished


@with_cgroups
def test_a_loaders_worker_that_was_killed_for_memory_is_named_and_so_is_its_node(train: Train) -> None:
    data = (FAILING_DATA, "data.how='runs out of memory'", "data.where=sample", "data.workers=1")
    failed = train(*RUN, PLAIN_MODEL, *data, "strategy=single", check=False)
    assert failed.returncode == 1
    assert re.search(r"DataLoader worker \(pid.*(by signal: Killed|exited unexpectedly)", failed.err)
    assert f"; {socket.gethostname()} ran out of memory\n" in failed.err


@pytest.mark.nightly
@with_cgroups
def test_another_process_that_the_kernel_killed_for_memory_is_not_blamed_for_a_bug(train: Train) -> None:
    failed = _failed(train, "model.how='sees another run out of memory'")
    assert failed.err.splitlines()[0].endswith(" failed: RuntimeError: this is the bug")


def test_a_killed_rank_that_the_run_started_is_named_and_what_resumes_the_run(train: Train) -> None:
    started = ("strategy=ddp", "trainer.devices=2", "callbacks.last_checkpoint.every_n_steps=1")
    slowly = "model.step_seconds=0.5"  # so that a checkpoint is whole by then
    failed = train(*RUN, *started, slowly, "model.how='is killed'", check=False)
    assert re.search(r"^go on      .*strategy=ddp .* run_id=mine$", failed.out, re.MULTILINE)
    assert re.fullmatch(r"rank 1 of 2 on \S+ failed: process \d+ was killed by SIGKILL", failed.err.splitlines()[0])
    assert ("Traceback" in failed.err, failed.returncode) == (False, 1)


@pytest.mark.nightly
def test_the_command_returns_once_the_ranks_that_it_started_have_ended(train: Train) -> None:
    run = train(*RUN, "trainer.devices=2", "model.how=lingers")
    assert (run.folder / "has ended").exists()


@pytest.mark.parametrize("rank", [1, *at_night(0)])
def test_a_rank_that_is_killed_is_named(rank: int, train: Train) -> None:
    fsdp = ("strategy=fsdp", "model.where='training_step 1'")  # whose first steps are refused for what it can't do
    killed = (*RUN[:3], *RUN[4:], *fsdp, "model.how='is killed'", f"model.rank={rank}")
    failed = train(*killed, ranks=2, check=False)
    assert failed.returncode == (-signal.SIGKILL if rank == 0 else 1)  # that of rank 0
    assert failed.err.splitlines()[0].startswith(f"rank {rank} of 2 on ")
    assert "it was killed, or crashed outside of Python" in failed.err.splitlines()[0]
    assert "Traceback" not in failed.err


KILLED = {
    "before the ranks meet": (PLAIN_MODEL, FAILING_DATA, "data.how='is killed'", "data.where=__init__"),
    "in a step": (FAILING_MODEL, PLAIN_DATA, "model.how='is killed'"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("when", KILLED)
def test_a_spawned_rank_that_is_killed_ends_the_others_and_is_named(when: str, train: Train) -> None:
    failed = train(*KILLED[when], RUN[2], *RUN[4:], "strategy=ddp_spawn", "trainer.devices=2", check=False)
    assert failed.returncode == 1
    assert re.search(r"rank 1 of 2 on \S+: process \d+ was killed by SIGKILL", failed.err), failed.err
    assert "Traceback" not in failed.err


@pytest.mark.parametrize("where", at_night("test_step 0", "training_step 2"))
def test_a_rank_that_hangs_is_found_with_the_line_it_stands_at(where: str, train: Train) -> None:
    failed = _failed(train, "model.how=hangs", f"model.where='{where}'", HUNG)
    line = failed.err.splitlines()[0]
    assert re.match(r"rank 1 of 2 on \S+ hangs at .*in fail: time\.sleep\(1000\)", line), line
    assert failed.returncode == 1


def test_the_crash_report_holds_what_each_rank_knows(train: Train) -> None:
    failed = _failed(train, "model.how=raises")
    (report,) = (failed.run_dir / "crash").iterdir()
    assert (report / "failure.txt").read_text().splitlines()[-1] == "RuntimeError: this is the bug"
    for rank in (0, 1):
        told = (report / f"rank_{rank}.txt").read_text()
        assert told.startswith(f"rank {rank} of 2 on ")
        assert "epoch 0, step 2, micro batch 0: samples " in told
        assert "hread 0x" in told
