"""A fork that was made at an earlier commit takes this engine, and trains with its own conf and train.py of then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.fork.forks import git, made
from tests.runs import CHECKOUT

pytestmark = pytest.mark.nightly

COMMIT = "0ddfbcd1508d7bb290e16cad60d80b9f083e36cf"  # of 2026-11-23, before the engine was distilled


def _python(fork: Path, *words: str) -> str:
    """Run Python with what the fork has in src/."""
    done = subprocess.run(
        [sys.executable, *words], cwd=fork, capture_output=True, text=True, timeout=1000,
        env={**os.environ, "PYTHONPATH": str(fork / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_fork_made_before_is_updated_and_trains(clone: Path, tmp_path: Path) -> None:
    if subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=CHECKOUT, capture_output=True).returncode:
        pytest.fail(f"expected the history down to {COMMIT[:7]}; type: git fetch --unshallow")
    then, fork = tmp_path / "then", tmp_path / "birdsong"
    git(tmp_path, "clone", "--quiet", "--no-checkout", str(CHECKOUT), str(then))
    git(then, "checkout", "--quiet", COMMIT)
    made(then, fork)
    told = _python(fork, "-m", "lightswitch.fork.update", str(clone))
    assert "judged.BestCheckpoint is now lightswitch.monitoring.monitored.BestCheckpoint" in told
    few = [
        "trainer.max_steps=4",
        "trainer.log_every_n_steps=1",
        "trainer.limit_val_batches=1",
        "trainer.limit_test_batches=1",
    ]
    losses = [
        _loss(_python(fork, "train.py", *few, "trainer.accelerator=cpu", *words))
        for words in (["strategy=single"], ["strategy=fsdp", "trainer.devices=2"])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def _loss(told: str) -> float:
    return next(float(line.split()[-1]) for line in told.splitlines() if line.startswith("train/loss"))
