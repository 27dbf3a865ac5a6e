"""`python train.py -m …`: each job is a run of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lightswitch.cluster.placement import Placement
from lightswitch.sweeps import job, record
from tests.engine.conftest import CHECKOUT, PLAIN
from tests.engine.launch.witness import WITNESS, witnesses

SHORT = (*PLAIN, *WITNESS, "trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2", "run_id=x")
FAST = (*SHORT, "trainer.devices=2", "logger=csv", "~callbacks.lr_monitor")

SWEPT = (*PLAIN, "run_id=x")

Sweep = Callable[..., "subprocess.CompletedProcess[str]"]


def command(script: Path, *arguments: str) -> list[str]:
    return ["python", str(script), "-m", *arguments]


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """The script of tests/engine/sweeps/swept.py, with the project's own config beside it."""
    (tmp_path / "conf").symlink_to(CHECKOUT / "conf")
    (tmp_path / "swept.py").symlink_to(CHECKOUT / "tests/engine/sweeps/swept.py")
    return tmp_path / "swept.py"


@pytest.fixture
def sweep(swept: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}")

    def run(*arguments: str, script: Path = swept, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(script, *arguments),
            cwd=swept.parent,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1000,
        )

    return run


def rows(out: str) -> list[list[str]]:
    """Of the table at the end."""
    table = re.split(r"^job +overrides.*$", out, flags=re.MULTILINE)[1]
    return [line.split() for line in table.strip().split("\n\n")[0].splitlines()]


def test_the_table_leaves_out_what_all_jobs_have() -> None:
    jobs = [
        record.Record(number, ["+trainer.max_steps=2", f"++model.lr={lr}"], "x") for number, lr in enumerate((1, 2))
    ]
    assert [row[1] for row in rows(record.table(jobs, "val/loss"))] == ["model.lr=1", "model.lr=2"]


def test_a_grid_trains_each_job_on_processes_of_its_own(sweep: Sweep, tmp_path: Path) -> None:
    done = sweep(*FAST, "strategy=ddp", "global_batch_size=24,0", script=CHECKOUT / "train.py")
    assert done.returncode == 1, done.stderr
    seen = witnesses(tmp_path / "runs/plainmodel/x/0")
    assert [(rank["world_size"], rank["local_rank"]) for rank in seen] == [(2, 0), (2, 1)]
    assert [row[-2] for row in rows(done.stdout)] == ["finished", "failed"]
    told = "job 1      error: global_batch_size 0 and micro_batch_size None: both are numbers of samples"
    assert f"1 of 2 jobs failed\n{told}" in done.stdout
    assert len(list(tmp_path.glob("runs/*/*"))) == 1


def test_what_has_finished_is_not_run_again(sweep: Sweep, tmp_path: Path) -> None:
    for _ in range(2):
        done = sweep(*SWEPT, "name=one,broken", "seed=3")
        assert done.returncode == 1
        assert rows(done.stdout) == [
            ["0", "name=one", "0.75", "finished", "runs/plainmodel/x/0"],
            ["1", "name=broken", "-", "failed", "runs/plainmodel/x/1"],
        ]
        assert done.stdout.endswith("1 of 2 jobs failed\njob 1      RuntimeError: it is broken\n")
    assert "job 0      has already finished" in done.stdout
    runs = tmp_path / "runs/plainmodel/x"
    assert [(runs / number / "starts").read_text() for number in "01"] == ["RUN\n", "RUN\nRUN\n"]


def test_a_sweep_may_begin_anew(sweep: Sweep, tmp_path: Path) -> None:
    for words in (("trainer.max_steps=5",), ("trainer.max_steps=6", "resume=never", "tags=[again]")):
        assert sweep(*SWEPT, "seed=1,2", *words).returncode == 0
    assert (tmp_path / "runs/plainmodel/x/1/starts").read_text() == "RUN\nRUN\n"


def test_what_has_finished_is_not_run_again_by_a_requeued_job(sweep: Sweep) -> None:
    first, requeued, another = (
        sweep(*FAST, "seed=1,2", "resume=never", ENVIRONMENT="BATCH", SLURM_JOB_ID=job, SLURM_RESTART_COUNT=count)
        for job, count in (("17", "0"), ("17", "1"), ("18", "0"))
    )
    assert [done.stdout.count("has already finished") for done in (first, requeued, another)] == [0, 2, 0]


def test_a_directory_of_another_job_is_left_as_it_is(sweep: Sweep, tmp_path: Path) -> None:
    assert sweep(*SWEPT, "seed=1,2").returncode == 0
    other = sweep(*SWEPT, "seed=1,3")
    assert other.returncode == 2
    assert (
        "error: runs/plainmodel/x/1 belongs to the job with seed=2; start this sweep under another run_id"
        in other.stderr
    )
    assert json.loads((tmp_path / "runs/plainmodel/x/1/results.json").read_text()) == {"val/loss": 0.5}
    swept_over_another_key = sweep(*SWEPT, "trainer.gradient_clip_val=0.1,0.2")
    assert (
        "runs/plainmodel/x/0 belongs to the job with seed=1, no trainer.gradient_clip_val;"
        in swept_over_another_key.stderr
    )


def test_a_sweep_of_optuna_goes_on_after_objectives_that_are_not_finite(sweep: Sweep) -> None:
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "+hydra.sweeper.sampler.seed=1", "seed=choice(1,2)")
    for repeated in (False, True):
        done = sweep(*SWEPT, *chosen, "name=nan")
        assert "Traceback" not in done.stderr
        assert "the sweep ended early: No trials are completed yet." in done.stdout
        assert [row[-2] for row in rows(done.stdout)] == ["finished"] * 2
        assert ("has already finished" in done.stdout) == repeated


@pytest.mark.parametrize("content", [b'{"number": 1, "ov', b"[]", b'{"number": 1}'])
def test_a_harmed_record_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(content)
    assert record.read(tmp_path) is None


def test_a_task_that_failed_is_not_overwritten_by_another_of_the_same_start(tmp_path: Path) -> None:
    failed = record.Record(0, [], "runs/x/0", record.FAILED, start="first")
    states = []
    for written in (
        failed,
        replace(failed, state=record.FINISHED),
        replace(failed, state=record.RUNNING, start="next"),
    ):
        record.write(written, tmp_path)
        states.append(record.read(tmp_path).state)
    assert states == [record.FAILED, record.FAILED, record.RUNNING]


@pytest.mark.parametrize("allocation", [{}, {"SLURM_JOB_ID": "17"}], ids=["no_slurm", "one_allocation"])
def test_a_job_that_failed_and_then_succeeds_has_finished(sweep: Sweep, allocation: dict[str, str]) -> None:
    first, second = (sweep(*SWEPT, "name=broken_once", **allocation) for _ in range(2))
    assert [(done.returncode, rows(done.stdout)[0][-2]) for done in (first, second)] == [(1, "failed"), (0, "finished")]


def test_tasks_of_one_start_have_one_id_and_another_step_of_their_allocation_has_another() -> None:
    first, second, step = (
        job.start_id(Placement("slurm", 1, 2, rank), {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": step})
        for rank, step in ((0, "0"), (1, "0"), (0, "1"))
    )
    assert first == second != step


def test_an_interrupt_ends_the_sweep_and_leaves_no_process(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}")
    process = subprocess.Popen(
        command(swept, *SWEPT, "name=waiting", "seed=1,2"), cwd=swept.parent, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 600
    while not (swept.parent / "runs/waiting/x/0/waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    (row,) = rows(out)
    assert row[-4:] == ["seed=1", "-", "stopped", "runs/waiting/x/0"]
    assert children
    assert psutil.wait_procs(children, timeout=300)[1] == [], "they would wait for an hour"


def test_a_sweep_that_nohup_started_goes_on_when_its_terminal_closes(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ended = job.run_to_its_end(["sh", "-c", f"kill -HUP {os.getpid()} $$"], tmp_path, is_lost=lambda: False)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == job.ProcessEnd(0, [])


def test_a_launcher_of_ranks_can_not_start_a_sweep(sweep: Sweep, tmp_path: Path) -> None:
    rank = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    refused = sweep(*SWEPT, "seed=1,2", **rank, MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: a sweep starts the processes of its jobs itself, but torchrun has started this process; "
        "type python train.py -m … with trainer.devices=N, or with hydra/launcher=submitit_slurm on a cluster\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_machine_without_slurm_submits_no_sweep(sweep: Sweep, tmp_path: Path) -> None:
    refused = sweep(*SWEPT, "hydra/launcher=submitit_slurm", PATH=str(Path(sys.executable).parent))
    told = "this machine has no sbatch; start the sweep on a machine of the cluster, or leave the launcher out"
    assert (refused.returncode, refused.stderr) == (2, f"error: hydra/launcher=submitit_slurm: {told}\n")
    assert not (tmp_path / "runs").exists()


def test_a_mistake_that_all_jobs_have_is_told_once_and_no_job_begins(sweep: Sweep, tmp_path: Path) -> None:
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "seed=range(0,1000)")
    refused = sweep(*SWEPT, *chosen, "trainer.max_stps=4")
    told = "error: trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?\n"
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", told)
    assert not (tmp_path / "runs").exists()
