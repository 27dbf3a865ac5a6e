"""Lightning's ClusterEnvironment for each launcher: how the processes of a run find each other."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightswitch.cluster import placement

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def detect() -> ClusterEnvironment:
    """Return the environment of the launcher that started this process.

    Lightning's own detection takes any shell in a Slurm job for a task of srun, and waits forever for the others.
    """
    found = placement.detect()
    if found.launcher == "slurm":
        # placement was read from srun's step; the variables that Lightning reads may be the job's, or missing
        os.environ.update(SLURM_NNODES=str(found.nodes), SLURM_NTASKS_PER_NODE=str(found.devices_per_node))
        return SLURMEnvironment()
    if found.launcher == "torchrun":
        return TorchElasticEnvironment()
    if found.launcher == "env":
        return by_environment()
    return LightningEnvironment()


def by_environment() -> ClusterEnvironment:
    """Return the environment of processes that export MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, one a terminal.

    Raises:
        ValueError: some are not exported.
    """
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not exported; each process needs {', '.join(_RENDEZVOUS)}")
    return ExportedEnvironment()


class ExportedEnvironment(TorchElasticEnvironment):
    """An environment as torchrun's, for processes that were not given their local rank."""

    def __init__(self) -> None:
        super().__init__()
        self._placement = placement.detect()
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank()))  # for libraries that read it, such as DeepSpeed

    def local_rank(self) -> int:
        return self._placement.rank % (self._placement.devices_per_node or 1)

    def node_rank(self) -> int:
        return self._placement.rank // (self._placement.devices_per_node or 1)


def by_hand(node_rank: int, main_address: str, main_port: int) -> ClusterEnvironment:
    """Return the environment of a run started by one command on each machine, which starts that machine's ranks.

    Args:
        node_rank: the machine's number, from 0.
        main_address: name or address of the machine with number 0.
        main_port: a free port there.
    """
    os.environ.update(NODE_RANK=str(node_rank), MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    return LightningEnvironment()
