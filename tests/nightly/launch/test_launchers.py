"""Processes of one run, each started by itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.engine.conftest import Finished, Train
from tests.engine.curves import largest_difference
from tests.engine.launch.test_launchers import COMMAND, RUN, TIMEOUT_SECONDS, finish, the_run
from tests.engine.launch.witness import witnesses
from tests.engine.processes import TRAIN_PY, Start


def test_ranks_with_different_values_say_so_in_every_terminal(start: Start, tmp_path: Path, port: str) -> None:
    (tmp_path / "runs/plainmodel/mine").mkdir(parents=True)
    (tmp_path / "runs/plainmodel/mine/config.yaml").write_text("an earlier run's")
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [start("python", TRAIN_PY, *RUN, "run_id=mine", f"seed={r}", **common, RANK=str(r)) for r in (0, 1)]
    outs = [rank.communicate(timeout=TIMEOUT_SECONDS)[0] for rank in ranks]
    host = socket.gethostname()
    assert [rank.returncode for rank in ranks] == [2, 2]
    line = f"error: rank 1 on {host} has seed=1, rank 0 on {host} has seed=0; give every process the same overrides\n"
    assert outs[0].endswith("\n" + line)
    assert outs[1] == line
    assert (tmp_path / "runs/plainmodel/mine/config.yaml").read_text() == "an earlier run's"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_terminals_of_nodes_with_different_numbers_of_processes_train_the_same_run(
    strategy: str, start: Start, train: Train, tmp_path: Path, port: str
) -> None:
    words = (*RUN, "global_batch_size=24", "trainer.log_every_n_steps=1")
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    places = [meet | dict(zip(names, place, strict=True)) for place in ("0002", "1012", "2101")]
    ranks = [start("python", TRAIN_PY, *words, f"strategy={strategy}", **place) for place in places]
    outs = [finish(rank) for rank in ranks]
    assert [(seen["node_rank"], seen["local_rank"]) for seen in witnesses(the_run(tmp_path))] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert [out.count("precision 32-true, 3 CPU on 2 nodes") for out in outs] == [1, 0, 0]
    run, alone = Finished(0, outs[0], "", tmp_path), train(*words, "strategy=single")
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(run, alone, metric) <= 1e-6, metric


# torchrun's other ways: alone, and by agents that are told their rank


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
