"""What the user can mend is told in a line; a bug keeps its traceback, whatever its class and who starts the ranks."""

from __future__ import annotations

import re
import socket

import pytest
import torch
from omegaconf import OmegaConf

from lightswitch.errors import LostRank
from lightswitch.failures import classify
from lightswitch.failures.classify import Rank, failure_of
from tests.engine.conftest import PLAIN, PLAIN_DATA, PLAIN_MODEL, Train
from tests.engine.failures.failing import FAILING_DATA, FAILING_MODEL
from tests.engine.tiny import LANGUAGE_MODEL, PICTURES
from tests.night import at_night

SHORT = ("run_id=mine", "trainer.accelerator=cpu", "trainer.max_steps=6", "trainer.val_check_interval=4")
BUG = (FAILING_MODEL, PLAIN_DATA, *SHORT)
BAD_DATA = (PLAIN_MODEL, FAILING_DATA, "data.how=refuses", *SHORT)
LAUNCHERS = {  # arguments, and the ranks that are started as torchrun starts them
    "one process": (("strategy=single",), 0),
    "python": (("strategy=ddp", "trainer.devices=2"), 0),
    "torchrun": (("strategy=ddp",), 2),
}
REFUSED = "this is no batch of mine"  # as the user's own code says


LINES: dict[str, tuple[tuple[str, ...], str]] = {  # what the user can mend: a request, and what its line has
    "a batch that the model does not take": (
        (*LANGUAGE_MODEL, PICTURES),
        "model: found a batch of torch.float32 of shape (7, 1, 8, 8); expected bytes (batch, time)",
    ),
    "no batches": (
        (PLAIN_MODEL, FAILING_DATA, "data.how=has no batches", "data.where=sample"),
        "data: train_dataloader has no batches; trainer.limit_train_batches=0 leaves training out",
    ),
    "a batch size of 0": (
        (*PLAIN, "data.batch_size=0"),
        "data: batch_size should be a positive integer value, but got batch_size=0",
    ),
    "no test set": (
        (PLAIN_MODEL, FAILING_DATA, "data.how=has no test"),
        "An invalid dataloader was returned from `FailingData.test_dataloader()`. Found None.",
    ),
    "a limit of less than a batch": (
        (*PLAIN, "trainer.limit_val_batches=0.01"),
        "You requested to check 0.01 of the `val_dataloader` but 0.01 * 1 < 1.",
    ),
    "data that are not there": (
        (PLAIN_MODEL, "data._target_=tests.engine.plain.AbsentData"),
        "data: /data/train.bin is not there",
    ),
    "a sample that is damaged": ((*BAD_DATA, "data.where=sample", "data.workers=0"), f"data: {REFUSED}"),
}


@pytest.mark.parametrize("what", LINES)
def test_what_the_user_can_mend_is_told_in_a_line(what: str, train: Train) -> None:
    words, line = LINES[what]
    assert line in train(*words, *SHORT, "strategy=single", check=False).refusal


def test_what_fails_because_the_run_directory_was_removed_is_told_as_that(train: Train) -> None:
    refused = train(*BUG, "model.how='loses its run'", "model.rank=0", "strategy=single", check=False)
    assert refused.refusal == "runs/failingmodel/mine was removed while the run wrote to it; start the run again"


@pytest.mark.parametrize("launcher", ["torchrun", *at_night("one process", "python")])
def test_a_bug_keeps_its_traceback_in_the_terminal_the_log_and_the_crash_report(launcher: str, train: Train) -> None:
    arguments, ranks = LAUNCHERS[launcher]
    is_alone = launcher == "one process"
    failed = train(*BUG, "model.how=refuses", f"model.rank={int(not is_alone)}", *arguments, ranks=ranks, check=False)
    told = f"ValueError: {REFUSED}"
    (report,) = (failed.run_dir / "crash").iterdir()
    assert failed.returncode == 1
    assert is_alone or failed.err.startswith(f"rank 1 of 2 on {socket.gethostname()} failed: {told}\n")
    assert failed.err.splitlines()[-1].startswith("crash report: runs/")
    first = report / ("rank_0.txt" if is_alone else "failure.txt")
    for text in (failed.err, (failed.run_dir / "train.log").read_text(), first.read_text()):
        assert text.count("Traceback (most recent call last):") >= 1
        assert text.count(f"\n{told}\n") == 1


@pytest.mark.parametrize(
    ("how", "where", "told"),
    [
        ("is interrupted", "training_step 3", "KeyboardInterrupt"),
        *at_night(
            ("exits", "training_step 3", "SystemExit: 2"), ("refuses", "validation_step 0", f"ValueError: {REFUSED}")
        ),
    ],
)
def test_of_two_ranks_the_one_that_fails_is_named_whatever_it_raises(
    how: str, where: str, told: str, train: Train
) -> None:
    failed = train(*BUG, f"model.how='{how}'", f"model.where='{where}'", "strategy=ddp", ranks=2, check=False)
    assert failed.err.startswith(f"rank 1 of 2 on {socket.gethostname()} failed: {told}\n")
    assert failed.returncode == 1
    assert "Traceback" in (failed.run_dir / "train.log").read_text()


def test_notes_and_groups_are_in_the_traceback_and_not_in_the_line() -> None:
    noted = RuntimeError("this is the bug")
    noted.add_note("and this a note")
    group = ExceptionGroup("several", [ValueError("the first"), KeyError("the second")])
    rank = Rank(1, 2, "node1", 7)
    told = [(failure_of(rank, error), text) for error, text in ((noted, "and this a note"), (group, "the second"))]
    assert all(text in failure.details for failure, text in told)
    assert [failure.line.partition(" failed: ")[2] for failure, _ in told] == [
        "RuntimeError: this is the bug",
        "ExceptionGroup: several (2 sub-exceptions)",
    ]


@pytest.mark.parametrize(("how", "where"), [("exits", "training_step 3"), *at_night(("is interrupted", "setup"))])
def test_code_that_ends_the_process_does_not_pass_for_a_run_that_is_finished(
    how: str, where: str, train: Train
) -> None:
    failed = train(*BUG, f"model.how='{how}'", f"model.where='{where}'", "model.rank=0", check=False)
    assert failed.returncode == 1
    assert "in fail" in failed.err
    assert "RuntimeError: the run was ended early by SystemExit(" in failed.err


@pytest.mark.parametrize(
    ("launcher", "rank", "where"),
    [
        *(("one process", "null", "sanity_check 0"), ("torchrun", "1", "configure_optimizers")),
        *at_night(("one process", "null", "__init__"), ("python", "null", "sanity_check 0")),
        *at_night(("torchrun", "null", "__init__"), ("python", "null", "setup")),
    ],
)
def test_what_is_raised_on_purpose_before_the_first_step_is_told_once(
    launcher: str, rank: str, where: str, train: Train
) -> None:
    arguments, ranks = LAUNCHERS[launcher]
    refuses = ("model.how=refuses", f"model.where='{where}'", f"model.rank={rank}")
    refused = train(*BUG, *refuses, *arguments, ranks=ranks, check=False)
    assert (refused.err, refused.returncode) == (f"error: model: {REFUSED}\n", 2)
    assert (refused.run_dir / "train.log").read_text().count(f"\nValueError: {REFUSED}\n") == 1
    assert not list(refused.folder.glob("runs/*/*/crash"))
    assert not list(refused.folder.glob(".*"))


def test_constructors_that_refuse_are_told_together_and_lightnings_own_without_a_traceback(train: Train) -> None:
    lost = (
        "callbacks.lost._target_=tests.engine.runs.refusing.Lost",
        "data._target_=tests.engine.runs.refusing.LostData",
    )
    refused = train(FAILING_MODEL, "model.how=refuses", "model.where=__init__", *lost, *SHORT, check=False)
    assert sorted(refused.err.splitlines()) == [
        "error: callbacks: [Errno 2] No such file or directory: 'lost.txt'",
        "error: data: [Errno 2] No such file or directory: 'nowhere.txt'",
        f"error: model: {REFUSED}",
    ]
    assert refused.returncode == 2
    log = (refused.run_dir / "train.log").read_text()
    assert (log.count("Traceback"), log.count("in fail"), log.count("in __init__")) == (3, 1, 3)
    refused = train(*PLAIN, "trainer.fast_dev_run=-1", "trainer.accelerator=cpu", check=False)
    assert refused.err.startswith("error: trainer: ")
    assert not (refused.folder / "runs").exists()


@pytest.mark.parametrize("where", ["setup", *at_night("prepare_data")])
def test_data_that_are_not_there_are_told_once_and_as_the_datas(where: str, train: Train) -> None:
    refused = train(*BAD_DATA, f"data.where={where}", "strategy=ddp", ranks=2, check=False)
    assert (refused.err, refused.returncode) == (f"error: data: {REFUSED}\n", 2)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/dev/full", "the disk is full: No space left on device"),
        ("/proc/version", "the disk failed: Input/output error"),
    ],
)
@pytest.mark.parametrize("steps_have_begun", [False, True])
def test_an_error_of_the_disk_is_told_in_a_line_whoever_writes(path: str, told: str, steps_have_begun: bool) -> None:
    with pytest.raises(OSError, match="Errno") as raised, open(path, "w") as file:
        file.write("metrics")
    problems = classify.problems_of(raised.value, OmegaConf.create(), steps_have_begun)
    assert problems == [f"{told}; fix it, then start the run again"]


def test_a_permission_that_is_not_of_a_file_is_a_bug() -> None:
    assert classify.problems_of(PermissionError(13, "Permission denied"), OmegaConf.create(), True) == []


def test_what_torchs_optimizer_refuses_before_the_first_step_is_told_in_a_line() -> None:
    with pytest.raises(ValueError, match="empty parameter list") as empty:
        torch.optim.SGD([])
    assert classify.problems_of(empty.value, OmegaConf.create(), False) == [
        "optimizer: optimizer got an empty parameter list"
    ]
    assert classify.problems_of(empty.value, OmegaConf.create(), True) == []


def test_a_bug_in_a_constructor_is_none_of_its_arguments(train: Train) -> None:
    failed = train(*BUG, "model.how='has Python raise'", "model.where=__init__", check=False)
    assert failed.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'three'" in failed.err
    assert "Traceback" in (failed.run_dir / "train.log").read_text()


@pytest.mark.parametrize("launcher", ["torchrun", *at_night("one process")])
def test_what_a_loaders_worker_raises_is_told_first_and_last(launcher: str, train: Train) -> None:
    arguments, ranks = LAUNCHERS[launcher]
    sample = ("data.how=raises", "data.where=sample", "data.workers=2")
    failed = train(*BAD_DATA, *sample, *arguments, ranks=ranks, check=False)
    first, *_, last = failed.err.splitlines()
    told = "RuntimeError: this is the bug"
    assert launcher == "one process" or first.endswith(f" failed: {told} (in DataLoader worker process 0)")
    assert last.startswith("crash report: ")
    assert f"\n{told}\n" in failed.err
    assert "is killed by signal" not in failed.err


def test_a_loaders_worker_that_ends_is_named_for_how_it_did(train: Train) -> None:
    failed = train(*BAD_DATA, "data.how=ends", "data.where=sample", "data.workers=1", check=False)
    assert failed.returncode == 1
    assert re.search(r"DataLoader worker \(pid.* exited unexpectedly", failed.err)
    assert "ran out of memory" not in failed.err


OUT_OF_MEMORY = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "CUDA": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "NCCL": RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
        "version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of "
        "memory'"
    ),
    "ROCm": RuntimeError("HIP error: out of memory"),
    "CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    "Python": MemoryError(),
}


@pytest.mark.parametrize("whose", OUT_OF_MEMORY)
def test_who_runs_out_of_memory_is_no_victim_of_another_rank(whose: str) -> None:
    found = failure_of(Rank(0, 2, "here", 1), OUT_OF_MEMORY[whose])
    assert (found.lacks_memory, found.follows) == (True, False)


def test_a_broken_connection_is_another_ranks_fault() -> None:
    found = failure_of(Rank(0, 2, "here", 1), RuntimeError("NCCL error: remote process exited or there was an error"))
    assert (found.lacks_memory, found.follows) == (False, True)


def test_a_rank_that_does_not_come_to_a_save_may_have_been_killed() -> None:
    lost = LostRank("the checkpoint could not be written: rank 1 did not write its shard")
    rank, cfg = Rank(0, 2, "here", 1), OmegaConf.create()
    assert not classify.failure(lost, cfg, rank, steps_have_begun=False).follows
    lost.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34177")
    assert classify.failure(lost, cfg, rank, steps_have_begun=False).follows
