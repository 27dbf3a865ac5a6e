"""`python train.py -m …`: each job is a run of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightswitch.sweeps import record
from tests.engine.conftest import CHECKOUT, PLAIN, PLAIN_DATA
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
            timeout=250,
        )

    return run


def rows(out: str) -> list[list[str]]:
    """Of the table at the end."""
    table = re.split(r"^job +overrides.*$", out, flags=re.MULTILINE)[1]
    return [line.split() for line in table.strip().split("\n\n")[0].splitlines()]


def test_a_grid_trains_each_job_on_processes_of_its_own(sweep: Sweep, tmp_path: Path) -> None:
    grid = ("strategy=ddp,ddp_fork", "global_batch_size=24,25")
    done = sweep(*FAST, *grid, script=CHECKOUT / "train.py")
    assert done.returncode == 1, done.stderr
    runs = tmp_path / "runs/plainmodel/x"
    for number, start_method in ((0, None), (2, "fork")):
        seen = witnesses(runs / str(number))
        assert [(rank["start_method"], rank["world_size"], rank["local_rank"]) for rank in seen] == [
            (start_method, 2, 0),
            (start_method, 2, 1),
        ]
    assert [row[-2] for row in rows(done.stdout)] == ["finished", "failed", "finished", "failed"]
    assert rows(done.stdout)[2][:2] == ["2", "strategy=ddp_fork"]
    assert "2 of 4 jobs failed\njob 1      error: global_batch_size 25 does not divide over 2 devices" in done.stdout
    assert len(list(tmp_path.glob("runs/*/*"))) == 1


def test_optuna_samples_once_for_all_ranks(sweep: Sweep, tmp_path: Path) -> None:
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "model.lr=interval(0.01,0.1)")
    done = sweep(*FAST, "strategy=ddp_fork", *chosen, script=CHECKOUT / "train.py")
    assert done.returncode == 0, done.stderr
    rates = []
    for number in range(2):
        first, second = witnesses(tmp_path / f"runs/plainmodel/x/{number}")
        assert first["hparams"] == second["hparams"]
        rates.append(first["hparams"]["lr"])
    assert len(set(rates)) == 2
    best = min(rows(done.stdout), key=lambda row: float(row[2]))
    written = (tmp_path / "runs/plainmodel/x/optimization_results.yaml").read_text()
    assert f"best_value: {best[2][:4]}" in written
    assert str(rates[int(best[0])]) in written


def test_what_has_finished_is_not_run_again(sweep: Sweep, tmp_path: Path) -> None:
    for _ in range(2):
        done = sweep(*SWEPT, "name=one,broken", "seed=3")
        assert done.returncode == 1
        assert rows(done.stdout) == [
            ["0", "name=one", "0.75", "finished", "runs/plainmodel/x/0"],
            ["1", "name=broken", "-", "failed", "runs/plainmodel/x/1"],
        ]
        assert done.stdout.endswith("1 of 2 jobs failed\njob 1      RuntimeError: it is broken\n")
    assert "job 0      has finished before" in done.stdout
    runs = tmp_path / "runs/plainmodel/x"
    assert [(runs / number / "starts").read_text() for number in "01"] == ["RUN\n", "RUN\nRUN\n"]


def test_an_objective_that_no_job_has_logged_is_told_with_what_they_have(sweep: Sweep) -> None:
    done = sweep(*SWEPT, "seed=1", "objective=accuracy")
    assert rows(done.stdout)[0][-3:-1] == ["-", "finished"]
    assert "\nno job has logged accuracy, only val/loss; type objective=val/loss for another metric, or" in done.stdout


def test_a_directory_of_another_job_is_left_as_it_is(sweep: Sweep, tmp_path: Path) -> None:
    assert sweep(*SWEPT, "seed=1,2").returncode == 0
    other = sweep(*SWEPT, "seed=1,3")
    assert other.returncode == 2
    assert "error: runs/plainmodel/x/1 holds the job with seed=2; start this sweep under another run_id" in other.stderr
    assert json.loads((tmp_path / "runs/plainmodel/x/1/results.json").read_text()) == {"val/loss": 0.5}


@pytest.mark.parametrize("content", [b'{"number": 1, "ov', b"[]", b'{"number": 1}'])
def test_a_harmed_record_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(content)
    assert record.read(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_harmed_record_of_a_job_is_one_warning(content: bytes, sweep: Sweep, tmp_path: Path) -> None:
    assert sweep(*SWEPT, "seed=1,2").returncode == 0
    harmed = tmp_path / "runs/plainmodel/x/1/job.json"
    harmed.write_bytes(content)
    again = sweep(*SWEPT, "seed=1,2")
    warning = "runs/plainmodel/x/1/job.json can't be read; the job is treated as unfinished\n"
    assert (again.returncode, again.stderr, again.stdout.count(warning)) == (0, "", 1)
    assert [row[-2] for row in rows(again.stdout)] == ["finished", "finished"]
    assert json.loads(harmed.read_text())["state"] == "finished"


def test_a_directory_whose_record_is_harmed_is_no_other_jobs(sweep: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "runs/plainmodel/x/0"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text("- run_id=x\n- seed=2\n")
    (folder / "job.json").write_text("")
    other = sweep(*SWEPT, "seed=3,4")
    assert other.returncode == 2
    assert "error: runs/plainmodel/x/0 holds the job with seed=2; start this sweep under another run_id" in other.stderr


def test_a_sweep_that_optuna_goes_on_with_is_sampled_as_before(sweep: Sweep) -> None:
    chosen = (*SWEPT, "hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1", "seed=range(0,1000)")
    first = sweep(*chosen, "hydra.sweeper.n_trials=2")
    more = sweep(*chosen, "hydra.sweeper.n_trials=3")
    assert (first.returncode, more.returncode) == (0, 0), more.stderr
    assert rows(more.stdout)[:2] == rows(first.stdout)
    assert more.stdout.count("has finished before") == 2


def test_an_interrupt_ends_the_sweep_and_leaves_no_process(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}")
    process = subprocess.Popen(
        command(swept, *SWEPT, "name=waiting", "seed=1,2"), cwd=swept.parent, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (swept.parent / "runs/waiting/x/0/waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    (row,) = rows(out)
    assert row[-4:] == ["seed=1", "-", "stopped", "runs/waiting/x/0"]
    assert children
    assert not any(child.is_running() for child in children)


def test_a_launcher_of_ranks_can_not_start_a_sweep(sweep: Sweep, tmp_path: Path) -> None:
    rank = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    refused = sweep(*SWEPT, "seed=1,2", **rank, MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: a sweep starts the processes of its jobs itself, and torchrun has started this one; "
        "type python train.py -m … with trainer.devices=N, or with hydra/launcher=submitit_slurm on a cluster\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_machine_without_slurm_submits_no_sweep(sweep: Sweep, tmp_path: Path) -> None:
    refused = sweep(*SWEPT, "hydra/launcher=submitit_slurm", PATH=str(Path(sys.executable).parent))
    told = "this machine has no sbatch; start the sweep on one of the cluster's, or leave the launcher out"
    assert (refused.returncode, refused.stderr) == (2, f"error: hydra/launcher=submitit_slurm: {told}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
def test_what_sbatch_does_not_take_is_told_in_a_line(sweep: Sweep, tmp_path: Path) -> None:
    (conf := tmp_path / "slurm.conf").write_text("ClusterName=none\n")  # of a cluster without a controller
    refused = sweep(*SWEPT, "hydra/launcher=submitit_slurm", SLURM_CONF=str(conf))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: sbatch takes no job: sbatch: error: ")
    assert "Traceback" not in refused.stderr


def test_a_job_is_handed_an_interpolation_and_not_the_secret_that_it_gives(sweep: Sweep, swept: Path) -> None:
    model = (
        "model._target_=tests.engine.config.secretive.SecretModel",
        "+model.token=${oc.env:API_TOKEN}",
        "+model.how=nothing",
    )
    rest = (PLAIN_DATA, "trainer.accelerator=cpu", "trainer.fast_dev_run=true", "run_id=x", "seed=1")
    done = sweep(*model, *rest, script=CHECKOUT / "train.py", API_TOKEN="hunter2-correct-horse")
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = swept.parent.glob("runs/*/x/0/job.json")
    overrides = json.loads(job.read_text())["overrides"]  # and so is the job's command line, which all can read
    assert [text.replace("\\", "") for text in overrides if "token" in text] == ["+model.token=${oc.env:API_TOKEN}"]
    written = [path for path in swept.parent.glob("runs/**/*") if path.is_file()]
    assert not [path for path in written if b"hunter2-correct-horse" in path.read_bytes()]
    assert "hunter2-correct-horse" not in done.stdout + done.stderr


def test_a_mistake_that_all_jobs_have_is_told_once_and_no_job_begins(sweep: Sweep, tmp_path: Path) -> None:
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "seed=range(0,1000)")
    refused = sweep(*SWEPT, *chosen, "trainer.max_stps=4")
    told = "error: trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?\n"
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", told)
    assert not (tmp_path / "runs").exists()
