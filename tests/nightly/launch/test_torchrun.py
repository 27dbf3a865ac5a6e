"""torchrun's other ways: alone, and by agents that are told their rank."""

from __future__ import annotations

from pathlib import Path

from tests.engine.launch.test_launchers import COMMAND, RUN, finish, the_run
from tests.engine.launch.witness import witnesses
from tests.engine.processes import TRAIN_PY, Start

LAUNCH = ("python", "-m", "torch.distributed.launch")  # its older name


def test_standalone_it_starts_one_run(start: Start, tmp_path: Path) -> None:
    out = finish(start(*COMMAND, "--standalone", "--nproc-per-node=2", TRAIN_PY, *RUN))
    run_dir = the_run(tmp_path)
    first, second = witnesses(run_dir)
    assert [first["local_rank"], second["local_rank"]] == [0, 1]
    assert (first["world_size"], first["strategy"], first["cluster"]) == (2, "DDP", "TorchElasticEnvironment")
    assert out.count("strategy   DDP, precision 32-true, 1 node × 2 CPU") == 1
    assert f"\nevaluate   torchrun --standalone --nproc-per-node=2 {TRAIN_PY} model._target_=" in out


def test_agents_that_are_told_their_rank_start_one_run(start: Start, tmp_path: Path, port: str) -> None:
    place = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}")
    run = (TRAIN_PY, *RUN, "run_id=mine")
    agents = [start(*command, *place, f"--node-rank={rank}", *run) for rank, command in enumerate((LAUNCH, COMMAND))]
    outs = [finish(agent) for agent in agents]
    assert [seen["node_rank"] for seen in witnesses(the_run(tmp_path))] == [0, 1]
    assert [out.count("strategy   DDP, precision 32-true, 2 nodes × 1 CPU") for out in outs] == [1, 0]
