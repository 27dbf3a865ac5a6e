"""torchrun in each of its ways, with real agents: one run, in one run directory, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Finished, Train
from tests.engine.fault_tolerance.pace import FAILS_ONCE
from tests.engine.launch.test_launchers import RUN, finish, the_run
from tests.engine.launch.witness import witnesses
from tests.engine.processes import TRAIN_PY, Start

TORCHRUN = ("python", "-m", "torch.distributed.run")
LAUNCH = ("python", "-m", "torch.distributed.launch")  # its older name


def test_standalone_it_starts_one_run(start: Start, tmp_path: Path) -> None:
    out = finish(start(*TORCHRUN, "--standalone", "--nproc-per-node=2", TRAIN_PY, *RUN))
    run_dir = the_run(tmp_path)
    first, second = witnesses(run_dir)
    assert [first["local_rank"], second["local_rank"]] == [0, 1]
    assert (first["world_size"], first["strategy"], first["cluster"]) == (2, "DDP", "TorchElasticEnvironment")
    assert out.count("strategy   DDP, precision 32-true, 1 node × 2 CPU") == 1
    assert f"\nevaluate   torchrun --standalone --nproc-per-node=2 {TRAIN_PY} model._target_=" in out


def test_agents_that_are_told_their_rank_start_one_run(start: Start, tmp_path: Path, port: str) -> None:
    place = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}")
    run = (TRAIN_PY, *RUN, "run_id=mine")
    agents = [start(*command, *place, f"--node-rank={rank}", *run) for rank, command in enumerate((LAUNCH, TORCHRUN))]
    outs = [finish(agent) for agent in agents]
    assert [seen["node_rank"] for seen in witnesses(the_run(tmp_path))] == [0, 1]
    assert [out.count("strategy   DDP, precision 32-true, 2 nodes × 1 CPU") for out in outs] == [1, 0]


def test_a_run_that_agents_restart_goes_on_where_it_stood(
    start: Start, train: Train, tmp_path: Path, port: str
) -> None:
    place = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    run = (*RUN, "trainer.max_steps=8", "trainer.log_every_n_steps=1")
    fails = (FAILS_ONCE, "callbacks.fails.step=5")
    agents = [start(*TORCHRUN, *place, "--rdzv-id=mine", "--max-restarts=1", TRAIN_PY, *run, *fails) for _ in (0, 1)]
    out = "".join(finish(agent) for agent in agents)
    assert "RuntimeError: a passing fault" in out
    assert "resumes    runs/plainmodel/mine/checkpoints/best.ckpt, at step 4" in out
    restarted, uninterrupted = Finished(0, out, "", tmp_path, "mine"), train(*run, "strategy=single")
    assert restarted.column("train/loss") == pytest.approx(uninterrupted.column("train/loss"), abs=1e-5)
