"""More of `python train.py -m …`: Optuna, records that are harmed, secrets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN_DATA
from tests.engine.launch.witness import witnesses
from tests.engine.sweeps.test_sweeps import FAST, SWEPT, Sweep, rows, sweep, swept

__all__ = ["sweep", "swept"]  # fixtures


def test_optuna_samples_once_for_all_ranks(sweep: Sweep, tmp_path: Path) -> None:
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "model.lr=interval(0.01,0.1)")
    done = sweep(*FAST, "strategy=ddp", *chosen, script=CHECKOUT / "train.py")
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


def test_an_objective_that_no_job_has_logged_is_told_with_what_they_have(sweep: Sweep) -> None:
    done = sweep(*SWEPT, "seed=1", "objective=accuracy")
    assert rows(done.stdout)[0][-3:-1] == ["-", "finished"]
    assert "\nno job has logged accuracy, only val/loss; type objective=val/loss for another metric, or" in done.stdout


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
    assert "error: runs/plainmodel/x/0 belongs to the job with seed=2, no ~model" in other.stderr


def test_a_sweep_that_optuna_goes_on_with_is_sampled_as_before(sweep: Sweep) -> None:
    chosen = (*SWEPT, "hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1", "seed=range(0,1000)")
    first = sweep(*chosen, "hydra.sweeper.n_trials=2")
    more = sweep(*chosen, "hydra.sweeper.n_trials=3")
    assert (first.returncode, more.returncode) == (0, 0), more.stderr
    assert rows(more.stdout)[:2] == rows(first.stdout)
    assert more.stdout.count("has already finished") == 2


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
def test_what_sbatch_does_not_take_is_told_in_a_line(sweep: Sweep, tmp_path: Path) -> None:
    (conf := tmp_path / "slurm.conf").write_text("ClusterName=none\n")  # of a cluster without a controller
    refused = sweep(*SWEPT, "hydra/launcher=submitit_slurm", SLURM_CONF=str(conf))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: sbatch rejected the job: sbatch: error: ")
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
    assert [text.replace("\\", "") for text in overrides if "token" in text] == ["++model.token=${oc.env:API_TOKEN}"]
    written = [path for path in swept.parent.glob("runs/**/*") if path.is_file()]
    assert not [path for path in written if b"hunter2-correct-horse" in path.read_bytes()]
    assert "hunter2-correct-horse" not in done.stdout + done.stderr
