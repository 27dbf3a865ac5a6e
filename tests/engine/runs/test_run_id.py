"""One name for all processes of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import psutil
import pytest

from lightswitch.errors import RefusedRequest
from lightswitch.runs.claim import new_run_id

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
