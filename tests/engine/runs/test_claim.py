"""Two starts of one run id: one trains, and the other is told who does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

from lightswitch.errors import RefusedRequest
from lightswitch.runs import claim
from lightswitch.runs.claim import new_run_id
from tests.engine.conftest import PLAIN, Train, runs_in
from tests.engine.failures.pace import PACE_TARGET
from tests.night import at_night

RUN = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "logger=csv", "~callbacks.lr_monitor", "trainer.max_steps=6")
PACE = (PACE_TARGET, "callbacks.pace.seconds=1")
WAITS = (PACE_TARGET, "callbacks.pace.seconds=600", "callbacks.pace.until=go_on")

Processes = list[multiprocessing.process.BaseProcess]


@pytest.mark.parametrize("ranks", [0, *at_night(2)])
def test_of_two_starts_at_once_exactly_one_trains(ranks: int, train: Train, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    starts, folder = (train, runs_in(tmp_path / "other")), tmp_path / "runs_here"
    run = (*RUN, *WAITS, *(["strategy=ddp"] if ranks else []))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(start, *run, ranks=ranks, folder=folder, check=False) for start in starts]
        wait(both, return_when=FIRST_COMPLETED)
        (folder / "go_on").touch()  # the one that trains waits until the other has ended
    trained, refused = sorted((start.result() for start in both), key=lambda start: start.returncode)
    assert (trained.returncode, refused.returncode) == (0, 2), trained.err + refused.err
    assert re.fullmatch(
        r"error: runs/plainmodel/mine is being written by process \d+ on \S+, since [\d-]+ [\d:]+; "
        "wait until it has ended, or give this run another run_id\n",
        refused.err,
    )
    assert [row["step"] for row in trained.metrics() if row.get("val/loss") or row.get("test/loss")] == ["5", "6"]
    assert not (trained.run_dir / claim.LOCK).exists()


@pytest.mark.parametrize("signals", [[signal.SIGKILL], *at_night(([signal.SIGINT] * 2,))], ids=str)
def test_a_run_that_was_ended_can_be_started_again(signals: list[signal.Signals], train: Train, tmp_path: Path) -> None:
    def end_it(processes: Processes) -> None:
        _until((tmp_path / "1/runs/plainmodel/mine/metrics.csv").exists)
        for number in signals:
            with contextlib.suppress(ProcessLookupError):  # the first signal may have ended it by now
                os.kill(processes[0].pid or 0, number)
            time.sleep(0.1)

    run = (*RUN, "trainer.log_every_n_steps=1", "trainer.max_steps=100")
    ended = train(*run, *PACE, meanwhile=end_it, check=False)
    assert ended.returncode != 0
    assert (ended.run_dir / claim.LOCK).exists() == (signals == [signal.SIGKILL])
    train(*run, folder=ended.folder)
    assert not (ended.run_dir / claim.LOCK).exists()


def test_beside_a_run_a_finished_start_says_so_and_an_evaluation_leaves_its_record(train: Train) -> None:
    first = train(*RUN)
    run_dir = first.run_dir
    names = ("config.yaml", "run.json", ".hydra/config.yaml", ".hydra/overrides.yaml")
    record = {name: (run_dir / name).read_text() for name in names}
    results = json.loads((run_dir / "results.json").read_text())
    release = claim.lock(run_dir)
    assert "finished   fit and test have ended at step 6" in train(*RUN, folder=first.folder).out
    last = "ckpt_path=runs/plainmodel/mine/checkpoints/last.ckpt"
    train(*PLAIN, "mode=test", last, folder=first.folder)
    release()
    (own,) = (path for path in first.folder.glob("runs/plainmodel/*") if path.name != "mine")
    assert "test/loss" in (own / "metrics.csv").read_text()
    train(*RUN, "mode=validate", "ckpt_path=last", "data.batch_size=5", folder=first.folder)  # with the run's own id
    assert {name: (run_dir / name).read_text() for name in names} == record
    assert json.loads((run_dir / "results.json").read_text()).keys() >= results.keys()
    assert "finished   fit and test have ended at step 6" in train(*RUN, folder=first.folder).out


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# One name for all processes of a run


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # of srun
BATCH = {"ENVIRONMENT": "BATCH"}  # in an sbatch script, and in what it starts
EXPORTED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**BATCH, "SLURM_JOB_ID": "17"}, "17"),
        ({**BATCH, "SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}, "17_2"),
        ({**STEP, "SLURM_JOB_ID": "17"}, "17"),
        ({**BATCH, **STEP, "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}, "17"),
        ({**STEP, "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}, "17.3"),
        ({**STEP, "SLURM_JOB_ID": "17", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4321"}, "17"),
        ({**TORCHRUN, **STEP, "SLURM_JOB_ID": "17"}, "17"),
        ({**TORCHRUN, "SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "mine"}, "mine"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "mine"}, "mine"),
    ],
)
def test_a_launcher_names_the_run(environ: dict[str, str], expected: str) -> None:
    assert new_run_id(environ) == expected


def test_the_clock_names_a_run_that_is_typed_in_a_shell_or_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    salloc, pty = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2"}, {**STEP, "SLURM_JOB_ID": "17", "SLURM_PTY_PORT": "4321"}
    for environ in ({}, salloc, pty):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{6}", new_run_id(dict(environ)))
    terminal, other_end = os.openpty()  # of a batch job
    with os.fdopen(other_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert new_run_id({**BATCH, "SLURM_JOB_ID": "17"}) != "17"
    os.close(terminal)


def test_the_processes_of_one_torchrun_agree_by_their_parent() -> None:
    script = (
        "from lightswitch.runs.claim import new_run_id\n"
        "import os; print(new_run_id({**os.environ, 'RANK': '0', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2',"
        "'TORCHELASTIC_RUN_ID': 'none'}))"
    )
    names = {subprocess.check_output([sys.executable, "-c", script], text=True).strip() for _ in range(2)}
    (named,) = names
    assert named.endswith(f"_{psutil.Process().pid}")
    assert len({new_run_id({}) for _ in range(100)}) == 100  # of one second


def test_torchrun_that_would_name_a_run_anew_when_it_restarts_it_needs_an_id() -> None:
    for nodes in ("1:2", "2"):  # elastic; without a store that outlives a restart
        with pytest.raises(RefusedRequest, match=r"torchrun without --rdzv-id: .*type --rdzv-id=NAME"):
            new_run_id({**TORCHRUN, "WORLD_SIZE": "4", "PET_NNODES": nodes})
    assert new_run_id({**EXPORTED, "WORLD_SIZE": "1"})  # a single process
