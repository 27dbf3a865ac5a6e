"""Offload to disk, with DeepSpeed's operator, which is built first as the refusal says: in ten minutes of a CPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightswitch.deepspeed.config import operator_problems
from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.launch.test_launchers import finish
from tests.engine.processes import TRAIN_PY, Start
from tests.engine.tiny import LANGUAGE
from tests.engine.tours.test_tours import KILL
from tests.engine.ways import WAYS, Way

pytestmark = pytest.mark.timeout(7200)

# wide enough for shards of 1 MiB at two ranks, as smaller ones stay in memory
RUN = (*LANGUAGE, "model.width=512", "run_id=mine", "trainer.accelerator=cpu", "trainer.max_steps=12")
RUN += ("trainer.val_check_interval=6", "callbacks.last_checkpoint.every_n_steps=2")
DISK = "strategy=deepspeed_stage_3_offload_nvme"
CHAINS = [("disk × 2", "fsdp × 2"), ("ddp × 2", "disk × 2"), ("disk × 2", "disk × 1")]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory, python: Path) -> dict[str, Way]:
    for line in operator_problems("async_io", "this test"):
        command = shlex.split(line[line.index("python -c") :])
        subprocess.run([python, *command[1:]], check=True)
    drive = tmp_path_factory.mktemp("drive")
    on_disk = (DISK, f"trainer.strategy.nvme_path={drive}")
    return WAYS | {"disk × 1": Way(on_disk, 1), "disk × 2": Way(on_disk, 2)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, "strategy=single")


@pytest.mark.parametrize(("first", "then"), CHAINS)
def test_a_run_on_disk_has_the_curve_of_one_process_also_if_it_is_killed(
    first: str, then: str, ways: dict[str, Way], alone: Finished, train: Train
) -> None:
    kill = (KILL, "callbacks.kill.seed=3")
    killed = train(*RUN, *ways[first].switches, *kill, ranks=ways[first].ranks, check=False)
    assert killed.returncode != 0
    run = train(*RUN, *ways[then].switches, ranks=ways[then].ranks, folder=killed.folder)
    assert "\nresumes    " in run.out
    assert list(run.column("train/loss")) == list(range(12))
    for metric in ("train/loss", "val/loss", "test/loss", "samples"):
        assert largest_difference(run, alone, metric) <= 1e-5, metric


def test_a_run_leaves_nothing_on_the_drive(ways: dict[str, Way], tmp_path: Path, start: Start) -> None:
    """Run a command: ranks that a test forks end without what is registered for Python's exit."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN_PY, *RUN, DISK)
    words = (f"trainer.strategy.nvme_path={tmp_path}", "trainer.max_steps=1")
    built = {name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ}
    finish(start(*launch, *words, **built))
    assert not list(tmp_path.glob("**/*.swp"))


class Reads(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.transformer.blocks[0].mlp.input.weight.norm()  # type: ignore[union-attr, operator, index]


def test_a_hook_that_accesses_a_weight_on_disk_is_refused(ways: dict[str, Way], train: Train) -> None:
    hook = "callbacks.mine._target_=tests.nightly.test_disk.Reads"
    refused = train(*RUN, *ways["disk × 1"].switches, hook, ranks=1, check=False)
    assert refused.returncode == 2
    assert "on_train_start of Reads accesses " in refused.err
