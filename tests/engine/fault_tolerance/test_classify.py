"""What the user can mend is told in a line; a bug keeps its traceback, whatever its class and who starts the ranks."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightswitch.fault_tolerance import classify
from tests.engine.conftest import PLAIN, PLAIN_DATA, PLAIN_MODEL, Finished, Train
from tests.engine.processes import TRAIN_PY, Start, said
from tests.engine.tiny import LANGUAGE_MODEL, PICTURES

from_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have neither notes nor groups")

RAISING_MODEL = "model._target_=tests.engine.fault_tolerance.raising.RaisingModel"
RUN = (*PLAIN, "trainer.accelerator=cpu", "run_id=mine", "trainer.max_steps=1", "trainer.val_check_interval=1")
SHORT = ("run_id=mine", "trainer.accelerator=cpu", "trainer.max_steps=6", "trainer.val_check_interval=4")
BUG = (RAISING_MODEL, PLAIN_DATA, *SHORT)
BAD_DATA = (PLAIN_MODEL, "data._target_=tests.engine.fault_tolerance.raising.RaisingData", *SHORT)
LAUNCHERS = {  # arguments, and the ranks that are started as torchrun starts them
    "one process": (("strategy=single", "model.rank=0"), 0),
    "python": (("strategy=ddp", "trainer.devices=2"), 0),
    "fork": (("strategy=ddp_fork", "trainer.devices=2"), 0),
    "torchrun": (("strategy=ddp",), 2),
}


def _is_a_line(refused: Finished, line: str) -> None:
    assert refused.err.splitlines()[-1] == f"error: {line}"
    assert "Traceback" not in refused.err
    assert refused.returncode == 2


@pytest.mark.parametrize("strategy", ["single", "ddp_fork"])
def test_a_batch_that_the_model_does_not_take_is_told_in_a_line(strategy: str, train: Train) -> None:
    refused = train(*LANGUAGE_MODEL, PICTURES, f"strategy={strategy}", "trainer.accelerator=cpu", check=False)
    _is_a_line(refused, "model: found a batch of torch.float32 of shape (7, 1, 8, 8); expected bytes (batch, time)")
    assert "in validation_step" in (refused.run_dir / "train.log").read_text()  # the traceback


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_bug_keeps_its_traceback_in_the_terminal_the_log_and_the_crash_report(launcher: str, train: Train) -> None:
    arguments, ranks = LAUNCHERS[launcher]
    failed = train(*BUG, "model.error=value", "model.where='training_step 3'", *arguments, ranks=ranks, check=False)
    _keeps_its_traceback(failed, "ValueError: this is no batch of mine", is_alone=launcher == "one process")


def _keeps_its_traceback(failed: Finished, told: str, is_alone: bool = False, rank: int = 1) -> None:
    (report,) = (failed.run_dir / "crash").iterdir()
    assert failed.returncode == 1
    assert is_alone or failed.err.startswith(f"rank {rank} of 2 on {socket.gethostname()} failed: {told}\n")
    assert failed.err.splitlines()[-1].startswith("crash report: runs/")
    first = report / ("rank_0.txt" if is_alone else "failure.txt")
    for text in (failed.err, (failed.run_dir / "train.log").read_text(), first.read_text()):
        assert text.count("Traceback (most recent call last):") >= 1
        assert text.count(f"\n{told}\n") == 1


@pytest.mark.parametrize(
    ("error", "where", "told"),
    [
        ("value", "validation_step", "ValueError: this is no batch of mine"),
        ("of C", "setup fit", "ValueError: invalid literal for int() with base 10: 'three'"),
        ("exit", "training_step 3", "SystemExit: 2"),
        ("interrupt", "training_step 3", "KeyboardInterrupt"),
        pytest.param("noted", "training_step 3", "RuntimeError: this is the bug", marks=from_3_11),
        pytest.param("group", "setup fit", "ExceptionGroup: several (2 sub-exceptions)", marks=from_3_11),
    ],
)
def test_of_two_ranks_the_one_that_fails_is_named_whatever_it_raises(
    error: str, where: str, told: str, train: Train
) -> None:
    failed = train(*BUG, f"model.error='{error}'", f"model.where='{where}'", "strategy=ddp", ranks=2, check=False)
    assert failed.err.startswith(f"rank 1 of 2 on {socket.gethostname()} failed: {told}\n")
    assert failed.returncode == 1
    assert "Traceback" in (failed.run_dir / "train.log").read_text()


@pytest.mark.parametrize(("error", "where"), [("exit", "training_step 3"), ("interrupt", "setup fit")])
def test_code_that_ends_the_process_does_not_pass_for_a_run_that_is_finished(
    error: str, where: str, train: Train
) -> None:
    failed = train(*BUG, f"model.error={error}", f"model.where='{where}'", "model.rank=0", check=False)
    assert failed.returncode == 1
    assert "in fail" in failed.err
    assert "RuntimeError: the run was ended before it was finished, by SystemExit(" in failed.err


def test_an_exception_that_can_not_be_pickled_is_told_of_a_spawned_rank(train: Train) -> None:
    bug = ("model.error=unpicklable", "model.where='training_step 1'", "strategy=ddp_spawn", "trainer.devices=2")
    failed = train(*BUG, *bug, check=False)
    told = failed.err.partition(" failed: ")[2].partition("\n")[0]
    assert told.startswith("tests.engine.fault_tolerance.raising.Unpicklable: <function fail.<locals>.<lambda>")
    _keeps_its_traceback(failed, told)


def test_a_bug_in_a_callback_keeps_its_traceback(train: Train) -> None:
    callback = "callbacks.bug._target_=tests.engine.fault_tolerance.raising.RaisingCallback"
    failed = train(*RUN, callback, "callbacks.bug.error=value", "callbacks.bug.batch=0", check=False)
    _keeps_its_traceback(failed, "ValueError: this is no batch of mine", is_alone=True)


@pytest.mark.parametrize(
    ("launcher", "where"),
    [
        *(("one process", "__init__"), ("fork", "setup fit"), ("torchrun", "configure_optimizers")),
        *(("one process", "sanity_check"), ("torchrun", "__init__"), ("fork", "sanity_check")),
    ],
)
def test_what_is_raised_on_purpose_before_the_first_step_is_told_once(launcher: str, where: str, train: Train) -> None:
    arguments, ranks = LAUNCHERS[launcher]
    arguments = (*(word for word in arguments if word != "model.rank=0"), "model.rank=null")
    refused = train(*BUG, "model.error=value", f"model.where='{where}'", *arguments, ranks=ranks, check=False)
    assert (refused.err, refused.returncode) == ("error: model: this is no batch of mine\n", 2)
    assert (refused.run_dir / "train.log").read_text().count("\nValueError: this is no batch of mine\n") == 1
    assert not list(refused.folder.glob("runs/*/*/crash"))
    assert not list(refused.folder.glob(".*"))


def test_constructors_that_refuse_are_told_together_and_lightnings_own_without_a_traceback(train: Train) -> None:
    own = (RAISING_MODEL, "model.error=value", "model.where=__init__")
    lost = ("callbacks.lost._target_=tests.engine.runs.refusing.Lost", "run_id=mine")
    refused = train(*own, PLAIN_DATA, *lost, "trainer.accelerator=cpu", check=False)
    told = "error: callbacks: [Errno 2] No such file or directory: 'lost.txt'"
    assert refused.err.splitlines() == ["error: model: this is no batch of mine", told]
    log = (refused.run_dir / "train.log").read_text()
    assert (log.count("Traceback"), log.count("in fail"), log.count("in __init__")) == (2, 1, 2)
    fast = "trainer.fast_dev_run=-1"
    refused = train(*PLAIN, fast, "trainer.accelerator=cpu", check=False)
    assert refused.err.startswith("error: trainer: ")
    assert not (refused.folder / "runs").exists()


@pytest.mark.parametrize("where", ["prepare_data", "setup"])
def test_data_that_are_not_there_are_told_once_and_as_the_datas(where: str, train: Train) -> None:
    refused = train(*BAD_DATA, "data.error=value", f"data.where={where}", "strategy=ddp", ranks=2, check=False)
    assert (refused.err, refused.returncode) == ("error: data: this is no batch of mine\n", 2)


def test_data_that_turn_out_to_be_damaged_later_are_told_in_a_line(train: Train) -> None:
    refused = train(*BAD_DATA, "data.error=value", "data.where=sample", "strategy=single", check=False)
    _is_a_line(refused, "data: this is no batch of mine")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/dev/full", "the disk is full: No space left on device: /dev/full"),
        ("/proc/version", "the disk fails: Input/output error: /proc/version"),
        ("/proc/sys/kernel/ostype", "a permission is missing: Permission denied: /proc/sys/kernel/ostype"),
    ],
)
@pytest.mark.parametrize("steps_have_begun", [False, True])
def test_an_error_of_the_disk_names_the_file_whoever_writes(path: str, told: str, steps_have_begun: bool) -> None:
    with pytest.raises(OSError, match="Errno") as raised, open(path, "w") as file:
        file.write("metrics")
    problems = classify.problems_of(raised.value, OmegaConf.create(), steps_have_begun)
    assert problems == [f"{told}; mend it, and start the run again"]


def test_a_permission_that_is_not_of_a_file_is_a_bug() -> None:
    assert classify.problems_of(PermissionError(13, "Permission denied"), OmegaConf.create(), True) == []


CLOSED = ("strategy=single", "run_id=mine", "trainer.accelerator=cpu", "trainer.max_steps=300")


def test_a_run_without_stdout_ends_as_it_should(start: Start) -> None:
    words = (*PLAIN, *CLOSED, "trainer.max_steps=2")
    process = start("bash", "-c", 'exec "$@" >&-', "bash", "python", TRAIN_PY, *words)
    assert (said(process), process.returncode) == ("", 0)


def test_a_reader_of_stdout_that_has_gone_leaves_no_traceback(start: Start) -> None:
    words = ("bash", "python", TRAIN_PY, *PLAIN, *CLOSED, "trainer.log_every_n_steps=1")
    process = start("bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', *words, PYTHONUNBUFFERED="1")
    told = "error: stdout: found no reader any more, as after `| head`; lead it into a file, and start the run again\n"
    assert (said(process), process.returncode) in ((told, 2), ("", 0))  # where nothing but the log prints, it goes on


def test_a_bug_in_a_constructor_is_none_of_its_arguments(train: Train) -> None:
    failed = train(*BUG, "model.error='of C'", "model.where=__init__", check=False)
    assert failed.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'three'" in failed.err
    assert "Traceback" in (failed.run_dir / "train.log").read_text()


@pytest.mark.parametrize("launcher", ["one process", "torchrun"])
def test_what_a_loaders_worker_raises_is_told_first_and_last(launcher: str, train: Train) -> None:
    arguments, ranks = LAUNCHERS[launcher]
    arguments = tuple(word for word in arguments if word != "model.rank=0")
    sample = ("data.error='of C'", "data.where=sample", "data.workers=2")
    failed = train(*BAD_DATA, *sample, *arguments, ranks=ranks, check=False)
    told = "ValueError: invalid literal for int() with base 10: 'three'"
    first, *_, last = failed.err.splitlines()
    assert launcher == "one process" or first.endswith(f" failed: {told} (in DataLoader worker process 0)")
    assert last.startswith("crash report: ")
    assert f"\n{told}\n" in failed.err
    assert "is killed by signal" not in failed.err


def test_what_a_loaders_worker_raises_on_purpose_is_told_in_a_line(train: Train) -> None:
    sample = ("strategy=single", "data.error=value", "data.where=sample", "data.workers=2")
    _is_a_line(train(*BAD_DATA, *sample, check=False), "data: this is no batch of mine")


def test_a_loaders_worker_that_ends_is_named_for_how_it_did(train: Train) -> None:
    failed = train(*BAD_DATA, "data.error=os._exit", "data.where=sample", "data.workers=1", check=False)
    assert failed.returncode == 1
    assert re.search(r"DataLoader worker \S*.* (ended|exited unexpectedly) with exit code 9", failed.err)
    assert "ran out of memory" not in failed.err


@pytest.mark.parametrize("reads", ["mode=test ckpt_path={}", "trainer.max_steps=2"])
def test_a_checkpoint_of_another_model_is_told_in_a_line(reads: str, train: Train) -> None:
    first = train(*RUN)
    path = first.run_dir / "checkpoints" / "last.ckpt"
    refused = train(*RUN, "model.width=8", *reads.format(path).split(), folder=first.folder, check=False)
    assert refused.returncode == 2
    assert len(refused.err.splitlines()) == 1
    assert "net.0.weight is 16×2 in the checkpoint and 8×2 in the model" in refused.err


def test_a_file_that_is_no_checkpoint_is_told_in_a_line(train: Train, tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "some.pt")
    refused = train(*RUN, "mode=test", f"ckpt_path={tmp_path}/some.pt", check=False)
    assert refused.returncode == 2
    assert len(refused.err.splitlines()) == 1
    assert "can't be read as a checkpoint: it has no state_dict" in refused.err
