"""How the processes of a run find each other, as Lightning's ClusterEnvironment."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightswitch.cluster import placement

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def detect() -> ClusterEnvironment:
    """The environment of the launcher that started this process.

    Lightning's own detection takes any shell in a Slurm job for a task of srun, and waits for the others for ever.
    """
    place = placement.detect()
    if place.launcher == "slurm":
        # srun has told of its step, and the variables that Lightning asks for may be of the job, or missing
        os.environ.update(SLURM_NNODES=str(place.nodes), SLURM_NTASKS_PER_NODE=str(place.devices_per_node))
        return SLURMEnvironment()
    if place.launcher == "torchrun":
        return TorchElasticEnvironment()
    if place.launcher == "env":
        return by_environment()
    return LightningEnvironment()


def by_environment() -> ClusterEnvironment:
    """One process a terminal, with MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK exported.

    Raises:
        ValueError: some are not.
    """
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not exported; each process needs {', '.join(_RENDEZVOUS)}")
    return ExportedEnvironment()


class ExportedEnvironment(TorchElasticEnvironment):
    """As torchrun's, of processes that were not told their place on their node."""

    def __init__(self) -> None:
        super().__init__()
        self._place = placement.detect()
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank()))  # for what reads it, as DeepSpeed does

    def local_rank(self) -> int:
        return self._place.rank % (self._place.devices_per_node or 1)

    def node_rank(self) -> int:
        return self._place.rank // (self._place.devices_per_node or 1)


def by_hand(node_rank: int, main_address: str, main_port: int) -> ClusterEnvironment:
    """One command on each machine, which starts that machine's processes itself."""
    os.environ.update(NODE_RANK=str(node_rank), MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    return LightningEnvironment()
