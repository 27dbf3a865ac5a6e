"""Who started this process, where processes meet, and whether they were given the same."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch.distributed import TCPStore

from lightswitch.cluster.consistency import HIDDEN, Evidence, difference, digests
from lightswitch.cluster.environments import LocalEnvironment
from lightswitch.cluster.placement import Placement, detect
from lightswitch.cluster.rendezvous import MeetingPoint, agree_on_id, open_store
from lightswitch.cluster.sealed import Sealed
from lightswitch.config.confidential import Values
from lightswitch.errors import Refused
from lightswitch.runs.claim import meeting_place

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {
    **BATCH_SHELL,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
EXPORTED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Placement("local"), id="a shell"),
        pytest.param(TORCHRUN, Placement("torchrun", nodes=2, devices_per_node=4, rank=5), id="torchrun"),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "2"},
            Placement("torchrun", nodes=2, devices_per_node=4, rank=5, uneven=6),
            id="torchrun, unevenly",
        ),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "3", "RANK": "3"},
            Placement("torchrun", nodes=3, devices_per_node=4, rank=3, uneven=12),
            id="torchrun, unevenly before this node",
        ),
        pytest.param(SRUN, Placement("slurm", nodes=2, devices_per_node=2, rank=3), id="srun"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_NODEID": "1"},
            Placement("slurm", nodes=2, devices_per_node=2, rank=3, uneven=5),
            id="srun, unevenly",
        ),
        pytest.param(
            {
                **SRUN,
                "SLURM_STEP_NUM_NODES": "3",
                "SLURM_STEP_NUM_TASKS": "6",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
                "SLURM_NODEID": "1",
            },
            Placement("slurm", nodes=3, devices_per_node=2, rank=3),
            id="srun, evenly",
        ),
        pytest.param(BATCH_SHELL, Placement("local"), id="the shell of a batch script"),
        pytest.param(
            {**BATCH_SHELL, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
            Placement("local"),
            id="a single task of srun",
        ),
        pytest.param(
            {**SRUN, **TORCHRUN}, Placement("torchrun", nodes=2, devices_per_node=4, rank=5), id="torchrun in srun"
        ),
        pytest.param(EXPORTED, Placement("env", nodes=1, devices_per_node=2, rank=1), id="exported variables"),
        pytest.param(
            {**EXPORTED, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3"},
            Placement("env", nodes=2, devices_per_node=2, rank=3),
            id="exported variables on two nodes",
        ),
        pytest.param(
            {**EXPORTED, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
            Placement("env", nodes=2, devices_per_node=2, rank=1, uneven=3),
            id="exported variables, unevenly",
        ),
        pytest.param({"MASTER_ADDR": "node1", "MASTER_PORT": "1"}, Placement("local"), id="an address left over"),
        pytest.param(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            Placement("local", rank=1),
            id="a process that Lightning started",
        ),
    ],
)
def test_placement_is_read_from_the_environment(environ: dict[str, str], expected: Placement) -> None:
    assert detect(environ) == expected


def test_the_processes_of_a_launcher_are_external() -> None:
    assert detect(SRUN).is_external
    assert detect(TORCHRUN).is_external
    assert detect(EXPORTED).is_external
    assert not detect(BATCH_SHELL).is_external


# The port at which the processes that one process starts will meet


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalEnvironment:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return LocalEnvironment()


def test_nobody_is_given_the_port_of_a_run_before_its_rank_0_listens(local: LocalEnvironment) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", local.main_port))  # what the kernel asks of itself for a port it hands out


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_rank_0_can_listen_there(local: LocalEnvironment, address: str) -> None:
    with socket.create_server((address, local.main_port)):
        socket.create_connection(("127.0.0.1", local.main_port)).close()


def test_ranks_that_are_spawned_are_told_its_number(local: LocalEnvironment) -> None:
    port = local.main_port
    assert pickle.loads(pickle.dumps(local)).main_port == port != LocalEnvironment().main_port


def test_a_port_that_was_given_is_not_another(local: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert local.main_port == 29511


def test_processes_meet_to_take_the_id_of_rank_0_and_each_has_one_place(port: str) -> None:
    first = MeetingPoint("localhost", int(port), 0, 2, timeout_seconds=5)
    second, where = replace(first, rank=1), f"localhost:{port}"
    named, meeting = agree_on_id(first, "of rank 0")
    assert (named, agree_on_id(second, "of rank 1")[0]) == ("of rank 0", "of rank 0")
    with pytest.raises(Refused, match=f"a rank 1 has joined the run at {where} already; .*set another port"):
        agree_on_id(second, "of another run")
    with pytest.raises(Refused, match=f"is one of 3, but rank 0 at {where} is one of 2; .*set another port"):
        agree_on_id(replace(second, world_size=3), "of another run")
    with pytest.raises(Refused, match=f"port {port} of .* is in use"):
        agree_on_id(first, "of another run")
    assert open_store(first, "meeting", meeting).get("world") == b"2"  # where the process group is formed later


def test_a_store_of_another_program_is_told(port: str) -> None:
    other = TCPStore("localhost", int(port), is_master=True, wait_for_workers=False)
    with pytest.raises(Refused, match=f"rank 1 on .* could not reach .*:{port} in 0.5 s: the server there is not"):
        agree_on_id(MeetingPoint("localhost", other.port, 1, 2, timeout_seconds=0.5), "of rank 1")


LIGHTNINGS = {"MASTER_ADDR": "node1", "MASTER_PORT": "7", "NODE_RANK": "1"}
BY_HAND = {"main_address": "node1", "main_port": 7, "node_rank": 1}


@pytest.mark.parametrize(
    ("environ", "cfg", "place"),
    [
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, {}, ("node1", 29500, 5, 8)),
        (EXPORTED, {}, ("localhost", 29500, 1, 2)),
        ({**EXPORTED, "WORLD_SIZE": "1", "RANK": "0"}, {}, None),
        (LIGHTNINGS, {"trainer": {"num_nodes": 2}}, ("node1", 7, 1, 2)),
        (LIGHTNINGS, {"trainer": {"num_nodes": 1}}, None),
        (LIGHTNINGS, {"trainer": {"num_nodes": 2}, "mode": "plan"}, None),
        ({}, {"trainer": {"num_nodes": 2}, "cluster": BY_HAND}, ("node1", 7, 1, 2)),
        ({}, {"trainer": {"num_nodes": 2}, "cluster": {**BY_HAND, "node_rank": "???"}}, None),
        ({}, {"trainer": {"num_nodes": "two"}, "cluster": BY_HAND}, None),
    ],
)
def test_the_place_to_meet_is_that_of_the_launcher_or_of_cluster_manual(
    environ: dict[str, str], cfg: dict[str, object], place: object
) -> None:
    assert meeting_place(detect(environ), environ, OmegaConf.create(cfg)) == place


# Processes that were given different things, and what they are told

USUAL = Evidence(
    {"python": "3.12.1", "torch": "2.13.0"}, {"train.py": "a", "src/net.py": "b"}, "usual", run_dir="/runs/a"
)
FOUR = [replace(USUAL, rank=rank, node=f"node{rank // 2 + 1}") for rank in range(4)]
READABLE: Mapping[str, Mapping[str, str]] = {
    "usual": {"seed": "1", "data.token": f"{HIDDEN}a"},
    "other seed": {"seed": "2", "data.token": f"{HIDDEN}a"},
    "more": {"seed": "2", "data.token": f"{HIDDEN}a", "lr": "1"},
    "other token": {"seed": "1", "data.token": f"{HIDDEN}b"},
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {3: {"versions": {"python": "3.12.1", "torch": "2.12.0"}}},
            "rank 3 on node2 has torch 2.12.0, the other 3 have torch 2.13.0; install the same version on every node",
        ),
        (
            {2: {"code": {"train.py": "a", "src/net.py": "c", "new.py": "d"}}},
            "rank 2 on node2 has another src/net.py, another new.py than the other 3; use the same code on every node",
        ),
        (
            {0: {"config": "other seed"}, 1: {"config": "more"}, 3: {"config": "other seed"}},
            "rank 1 on node1 has lr=1, most have no lr; give every process the same overrides",
        ),
        (
            {3: {"config": "other token"}},
            "rank 3 on node2 has another data.token than the other 3; "
            "give every process the same overrides, and the same environment",
        ),
        (
            {3: {"config": "left nowhere"}},
            "rank 3 on node2 has another config than the other 3; "
            "give every process the same overrides, and the same environment",
        ),
        (
            {2: {"config": "", "sees_run_directory": False}, 3: {"config": "", "sees_run_directory": False}},
            "2 ranks on node2 do not see what rank 0 writes to the run directory; put it where all nodes can read it",
        ),
        (
            {1: {"config": "", "sees_run_directory": False, "run_dir": "/runs/b"}},
            "rank 1 on node1 has run directory /runs/b, rank 0 on node1 has run directory /runs/a; "
            "start every process in the same folder, with the same run_id",
        ),
    ],
    ids=["versions", "code", "config", "hidden value", "unreadable", "run directory", "other run"],
)
def test_the_odd_ones_are_named_with_what_they_have(changed: dict[int, dict[str, object]], told: str) -> None:
    assert difference([replace(one, **changed.get(one.rank, {})) for one in FOUR], READABLE.get) == told


def test_those_that_agree_are_told_nothing() -> None:
    assert difference(FOUR, READABLE.get) is None


def test_a_link_to_nothing_is_no_code(tmp_path: Path) -> None:
    """Such as an editor's lock beside the file that it edits."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/net.py").write_text("x = 1\n")
    (tmp_path / "src/.#net.py").symlink_to("me@here.4711")
    assert list(digests([tmp_path / "src"])) == ["src/net.py"]


VALUES = Values({"seed": "1", "data.token": "hunter2"}, frozenset({"data.token"}))


def test_a_digest_can_not_be_guessed_without_the_run_directory(tmp_path: Path) -> None:
    first, second = Sealed.make(tmp_path, VALUES), Sealed.make(tmp_path, VALUES)
    same = Sealed.find(tmp_path, first.folder.name, VALUES, 0)
    assert same is not None
    assert same.digest == first.digest != second.digest
    assert (first.folder.stat().st_mode & 0o777, (first.folder / "key").stat().st_mode & 0o777) == (0o700, 0o600)


def test_what_is_hidden_is_left_as_a_digest(tmp_path: Path) -> None:
    first = Sealed.make(tmp_path, Values({}))
    other = Sealed.find(tmp_path, first.folder.name, VALUES, 0)
    assert other is not None
    other.leave()
    assert "hunter2" not in (first.folder / other.digest).read_text()
    told = first.read(other.digest)
    assert told is not None
    assert told["seed"] == "1"


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", ".meeting_0123456789abcdef/..", ""])
def test_a_name_from_the_network_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key").write_bytes(bytes(32))
    (tmp_path / "run").mkdir()
    assert Sealed.find(tmp_path / "run", name, VALUES, 0) is None
