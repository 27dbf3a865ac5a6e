"""Environments as launchers set them."""

from __future__ import annotations

import pytest

from lightswitch.cluster.placement import Placement, detect

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
            Placement("torchrun", nodes=2, devices_per_node=4, rank=5, uneven="6 (here 4)"),
            id="torchrun, unevenly",
        ),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "3", "RANK": "3"},
            Placement("torchrun", nodes=3, devices_per_node=4, rank=3, uneven="12 (here 4)"),
            id="torchrun, unevenly before this node",
        ),
        pytest.param(SRUN, Placement("slurm", nodes=2, devices_per_node=2, rank=3), id="srun"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"},
            Placement("slurm", nodes=2, devices_per_node=2, rank=3, uneven="3,2"),
            id="srun, unevenly",
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
