import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lightswitch.regular_files import remove_tree
from tests.engine.conftest import PLAIN, Finished, Train
from tests.engine.processes import TRAIN_PY, Start, said

DRAWS = (
    *("model._target_=tests.engine.modules.optimization.ShowsPictures", "trainer.accelerator=cpu"),
    *("data._target_=tests.engine.modules.data.Images", "global_batch_size=8", "trainer.max_steps=2"),
    "trainer.log_every_n_steps=1",
)


def test_the_default_self_logger_draws_on_tensorboard_by_rank_0_alone(train: Train) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(*DRAWS, "strategy=ddp", ranks=2)
    (events,) = (run.run_dir / "tensorboard").glob("events.*")
    tags = EventAccumulator(str(events)).Reload().Tags()
    assert {"by_hand", "train/loss"} <= set(tags["scalars"])
    assert (tags["histograms"], tags["images"]) == (["pixels"], ["first"])
    assert list(run.column("train/loss")) == [0, 1]
    assert run.out.count("step 2/2 · loss ") == 1
    told = yaml.safe_load((run.run_dir / "tensorboard/hparams.yaml").read_text())
    assert (told["global_batch_size"], told["trainer"]["max_steps"]) == (8, 2)
    recorded = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    assert not {"optimizer", "scheduler"} & (told.keys() | recorded.keys())  # the module has its own
    sizes = {"nodes": 1, "devices": 2, "global_batch": 8, "micro_batch": 4, "accumulation": 1}
    assert told["sizes"].items() >= sizes.items()
    assert told["sizes"]["parameters"] == told["sizes"]["trained_parameters"] > 0


SERVICES = pytest.mark.skipif(
    (find_spec("mlflow") is None or find_spec("wandb") is None) and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"),
    reason="MLflow and wandb are extras",
)
LOGGED = (*PLAIN, "trainer.accelerator=cpu", "run_id=mine", "global_batch_size=8", "trainer.log_every_n_steps=1")
LOGGED = (*LOGGED, "callbacks.last_checkpoint.every_n_steps=4", "callbacks.last_checkpoint.keep=9")
OFFLINE = {"WANDB_MODE": "offline"}


def curve_of_tensorboard(run_dir: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def curves_of_mlflow(store: Path) -> list[tuple[str, list[tuple[int, float]]]]:
    """With the names of their runs, the shortest first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    histories = [(run.info.run_name, client.get_metric_history(run.info.run_id, "train/loss")) for run in runs]
    return sorted(
        ((name, [(one.step, one.value) for one in found]) for name, found in histories), key=lambda one: len(one[1])
    )


def runs_of_wandb(run_dir: Path) -> list[str]:
    return [path.name.split("-", 3)[-1] for path in sorted((run_dir / "wandb").glob("offline-run-*"))]


@pytest.mark.nightly
@SERVICES
def test_a_run_is_one_curve_in_each_logger_after_a_loss_of_steps_and_a_start_anew(train: Train) -> None:
    """A logger shows the steps that the run's checkpoints lead to, and no others, as metrics.csv does."""
    run: Finished | None = None
    for how, steps in (("resume=auto", 8), ("model.lr=0.5", 9), ("resume=never", 8)):
        if run and steps == 9:
            for path in [*(run.run_dir / "checkpoints").glob("*.ckpt")]:
                if path.is_dir() and path.resolve().name != "step_4.ckpt":
                    remove_tree(path.resolve())
        words = (*LOGGED, how, f"trainer.max_steps={steps}", "logger=[default,wandb]")
        run = train(*words, folder=run and run.folder, environment=OFFLINE)
        curve = [(step, pytest.approx(loss)) for step, loss in run.column("train/loss").items()]
        assert len(curve) == steps
        assert curve_of_tensorboard(run.run_dir) == curve
        assert set(runs_of_wandb(run.run_dir)) == ({"mine", "mine_1"} if how == "resume=never" else {"mine"})
    assert run is not None
    assert {path.name for path in run.run_dir.glob("*_1*")} == {"checkpoints_1", "metrics_1.csv", "tensorboard_1"}


@pytest.mark.nightly
@SERVICES
def test_a_run_that_resumes_is_one_curve_in_mlflow_and_one_that_starts_anew_another(train: Train) -> None:
    run, found = None, []
    for how in (("trainer.max_steps=4",), ("trainer.max_steps=8",), ("trainer.max_steps=6", "resume=never")):
        run = train(*LOGGED, "logger=[csv,mlflow]", *how, folder=run and run.folder)
        found.append(curves_of_mlflow(run.folder / "runs/mlflow.db"))
    assert [[len(curve) for name, curve in one] for one in found] == [[4], [8], [6, 8]]
    assert [name for name, _ in found[-1]] == ["mine", "mine"]


@pytest.mark.nightly
@SERVICES
def test_each_job_of_a_sweep_is_a_run_of_its_own_in_each_logger(train: Train) -> None:
    """What loggers know as `${run_id}` names one directory; a store that all runs share is where conf says."""
    folder = None
    for number in range(2):
        job = (f"hydra.run.dir=runs/plainmodel/mine/{number}", f"hydra.job.num={number}", "trainer.max_steps=2")
        run = train(*LOGGED, *job, "logger=[csv,mlflow,wandb]", folder=folder, environment=OFFLINE)
        folder = run.folder
        assert runs_of_wandb(folder / f"runs/plainmodel/mine/{number}") == [f"mine-{number}"]
    elsewhere = train(*LOGGED, "hydra.run.dir=elsewhere", "trainer.max_steps=2", "logger=[csv,mlflow]", folder=folder)
    names = sorted(name for name, _ in curves_of_mlflow(elsewhere.folder / "runs/mlflow.db"))
    assert names == ["mine", "mine-0", "mine-1"]


@pytest.mark.nightly
def test_wandb_without_its_package_says_what_to_install(start: Start) -> None:
    """Of a process of its own, whose Python has no extras."""
    ended = start("python", TRAIN_PY, *PLAIN, "trainer.accelerator=cpu", "logger=[default,wandb]")
    told = "error: logger: Requirement 'wandb>=0.12.10' not met. HINT: Try running `pip install -U 'wandb>=0.12.10'`\n"
    assert (said(ended).endswith(told), ended.returncode) == (True, 2)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is an extra")
def test_wandb_without_a_key_is_told_in_a_line(train: Train, tmp_path: Path) -> None:
    none = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online", "NETRC": str(tmp_path / "none")}
    refused = train(*PLAIN, "trainer.accelerator=cpu", "logger=[default,wandb]", environment=none, check=False)
    assert refused.err.splitlines()[-1] == (
        "error: logger: wandb: No API key configured. Use `wandb login` to log in. Or export WANDB_MODE=offline, for "
        "an offline run"
    )
    assert (refused.returncode, "Traceback" in refused.err) == (2, False)
