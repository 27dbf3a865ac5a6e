"""The commands that a run prints at its end, pasted."""

from __future__ import annotations

import shlex
import sys

import pytest

from lightswitch.launch import commands
from tests.conftest import CHECKOUT, PLAIN, Finished, Train
from tests.launch.test_placement import SRUN, TORCHRUN

OF_TRAINING = (
    "optimizer.lr=1e-4",
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
        (("strategy=ddp_fork", "trainer.devices=2"), "run_id=mine", "runs/plainmodel/mine"),
        ((), "hydra.run.dir='runs/sweep/3'", "runs/sweep/3"),
    ],
    ids=["a run", "a job of a sweep"],
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


@pytest.mark.parametrize(
    ("launcher", "starts"),
    [
        pytest.param({}, "python", id="a shell"),
        pytest.param(SRUN, "srun --nodes=2 --ntasks-per-node=2 python", id="srun"),
        pytest.param(TORCHRUN, "torchrun --nproc-per-node=4", id="torchrun"),
    ],
)
def test_commands_begin_with_the_launcher(
    launcher: dict[str, str], starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-u", "train.py", "strategy=ddp", "mode=fit", "seed=7"])
    assert commands.evaluate("best.ckpt") == f"{starts} train.py strategy=ddp seed=7 mode=test ckpt_path=best.ckpt"
