"""The commands that a run prints at its end, pasted."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster import placement
from lightswitch.config.overrides import normalised
from lightswitch.launch import commands
from lightswitch.launch.hydra_entry import register_resolvers
from tests.engine.cluster.test_placement import SRUN, TORCHRUN
from tests.engine.conftest import CHECKOUT, PLAIN, Finished, Train
from tests.engine.failures.pace import PACE_TARGET
from tests.night import at_night

OF_TRAINING = (
    "~callbacks.throughput",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=3",
    "trainer.val_check_interval=3",
)


def _command(run: Finished, what: str) -> list[str]:
    (line,) = (line for line in run.out.splitlines() if line.startswith(f"{what:<10} python "))
    python, script, *overrides = shlex.split(line.removeprefix(what))
    assert (python, script) == ("python", str(CHECKOUT / "train.py"))
    return overrides


@pytest.mark.parametrize(
    ("devices", "place", "run_dir"),
    [
        ((), "run_id=mine", "runs/plainmodel/mine"),
        *at_night((("strategy=ddp", "trainer.devices=2"), "hydra.run.dir='runs/sweep/3'", "runs/sweep/3")),
    ],
    ids=["a run", "a job of a sweep, on two devices"],
)
def test_what_a_run_says_to_type_next_can_be_pasted(
    devices: tuple[str, ...], place: str, run_dir: str, train: Train
) -> None:
    first = train(*PLAIN, *devices, place, *OF_TRAINING, "model.width=8")
    evaluate, go_on = _command(first, "evaluate"), _command(first, "go on")
    best = f"ckpt_path={run_dir}/checkpoints/best.ckpt"
    assert evaluate == [*PLAIN, *devices, "model.width=8", "mode=test", best]
    tested = train(*evaluate, "name=tested", folder=first.folder)
    assert f"reads      {run_dir}/checkpoints/best.ckpt, at step " in tested.out
    assert go_on[-1] == "trainer.max_epochs=4"
    gone_on = train(*go_on, folder=first.folder)
    assert f"resumes    {run_dir}/checkpoints/step_6.ckpt, at step 6" in gone_on.out
    assert "at step 12" in train(*go_on, folder=first.folder).out


@pytest.mark.nightly
def test_a_run_that_its_time_has_ended_goes_on_without_it(train: Train) -> None:
    own = (*PLAIN, "run_id=mine", "trainer.max_steps=1000", PACE_TARGET, "callbacks.pace.seconds=0.3")
    first = train(*own, "trainer.max_time={seconds: 1}", "trainer.limit_val_batches=0")
    assert _command(first, "go on")[-2:] == ["run_id=mine", "trainer.max_time=null"]


@pytest.mark.nightly
def test_a_schedule_with_a_length_goes_on_with_that_of_a_longer_run(train: Train) -> None:
    own = ("model._target_=tests.engine.plain.CycleModel", PLAIN[1], "logger=csv", "trainer.val_check_interval=2")
    first = train(*own, "run_id=mine", "trainer.max_steps=2")
    longer = (*own, "run_id=mine", "trainer.max_steps=4", "name=cyclemodel")
    assert "at step 2" in train(*longer, folder=first.folder).out  # by a schedule of four steps


@pytest.mark.parametrize(
    ("launcher", "starts"),
    [
        pytest.param({}, "python", id="a shell"),
        pytest.param(SRUN, "srun --nodes=2 --ntasks-per-node=2 python", id="srun"),
        pytest.param(
            SRUN | {"SLURM_GPUS_ON_NODE": "2"},
            "srun --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 python",
            id="srun with GPUs",
        ),
        pytest.param(TORCHRUN, "torchrun --nproc-per-node=4", id="torchrun"),
    ],
)
def test_commands_begin_with_the_launcher(
    launcher: dict[str, str], starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(psutil.Process, "parent", lambda _: None)  # what started pytest is no agent of torchrun's
    monkeypatch.setattr(
        sys, "orig_argv", ["/usr/bin/python3", "-u", "train.py", "strategy=ddp", "mode=fit", "optimizer.lr=1", "seed=7"]
    )
    assert (
        commands.evaluate("best.ckpt", placement.detect(), "test")
        == f"{starts} train.py strategy=ddp seed=7 mode=test ckpt_path=best.ckpt"
    )


NAMES = (
    *("1234_5", "1e3", "0x10", "007", "12", "1.5", "true", "null", "nan", "2026-11-21", "1_000.5", "_", "mine"),
    *("a,b", "a=b", "a=b,c=d", "-x", ".x", "--", "lr=1e-3,seed=2", "auto", "1-2_3"),
)
VALUES = (
    *("'a b'", '"it\'s"', r"'it\'s'", "''", "'a,b'", r"a\,b", "$HOME", "'$HOME `id` $(id)'", "[a,'b c',1]"),
    *("{a:1,b:[x,'y z']}", "'a=b'", r"'a\\b'", r"'a\\'", "'*.txt'", "'a/b'", "'é/b'", "'a/b c'", "'!x'", "1_0"),
    *("'a & b; c | d > e'", "'(x) [y] {z}'", "'true'", "'1_0'", r"'\\${x}'"),
)
OVERRIDES = (
    *(f"model.note{number}={value}" for number, value in enumerate(VALUES)),
    *("+note='~'", "~callbacks.throughput", "logger=[default,mlflow]", "precision=64-true", "optimizer.lr=1e-3"),
)
PATHS = (
    *("runs/gpt/mine/checkpoints/best.ckpt", "runs/gpt/a=b,c/checkpoints/best.ckpt", "runs/my run/it's/best.ckpt"),
    *("/data/größe/1_000/last.ckpt", r"runs/a\'b\/best.ckpt", "runs/$HOME/[x]/{y}/best.ckpt", "best.ckpt", "1_0"),
)


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    register_resolvers(placement.detect())
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        yield


def _composed(words: list[str]) -> DictConfig:
    return compose("config", normalised(words), return_hydra_config=True)


def _values(cfg: DictConfig) -> Any:
    return {key: value for key, value in OmegaConf.to_container(cfg).items() if key != "hydra"}


def _pasted(line: str) -> list[str]:
    """The arguments behind the script's name, as bash hands them on."""
    programs = "".join(f'{name}() {{ printf "%s\\0" "$@"; }}; ' for name in ("python", "torchrun", "srun"))
    words = subprocess.check_output(["bash", "-c", f"{programs}{line}"], text=True).split("\0")[:-1]
    return words[words.index("train.py") + 1 :]


@pytest.mark.parametrize("launcher", [{}, SRUN, TORCHRUN], ids=["a shell", "srun", "torchrun"])
def test_a_pasted_line_composes_what_the_run_had(launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    pairs = [*zip(NAMES[::2], NAMES[1::2], strict=True)]
    for number, (run_id, name) in enumerate(pairs if not launcher else pairs[:1]):
        typed = [*PLAIN, *(OVERRIDES if number == 0 else ()), f"run_id={run_id}", f"name={name}"]
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *typed])
        cfg = _composed(typed)
        assert (cfg.run_id, cfg.name) == (run_id, name)
        line = commands.repeat(cfg, placement.detect())
        assert _values(_composed(_pasted(line))) == _values(cfg), line


def test_a_pasted_evaluation_reads_that_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *PLAIN])
    for path in PATHS:
        assert _composed(_pasted(commands.evaluate(path, placement.detect(), "test"))).ckpt_path == path


def test_each_script_finds_what_they_share_in_the_same_lines() -> None:
    """Slurm copies one script, so these have to stand in each."""
    scripts = [path.read_text() for path in (CHECKOUT / "slurm").glob("*.sh") if "\n#SBATCH" in path.read_text()]
    beginnings = {text[text.index("set -euo") : text.index('source "$scripts/job.sh"')] for text in scripts}
    assert (len(scripts), len(beginnings)) == (4, 1)
