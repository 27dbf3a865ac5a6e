"""Lightning's ClusterEnvironment for each launcher: how the processes of a run find each other."""

from __future__ import annotations

import os
import socket
import weakref

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightswitch.cluster import placement


def detect() -> ClusterEnvironment:
    """Return the environment of the launcher that started this process.

    Lightning's detection treats any shell in a Slurm job as a task of srun, and waits forever for the other tasks.
    """
    found = placement.detect()
    if found.launcher == "slurm":
        # the placement is that of srun's step; the variables that Lightning reads may be the job's, or missing
        os.environ.update(SLURM_NNODES=str(found.nodes), SLURM_NTASKS_PER_NODE=str(found.devices_per_node))
        return SLURMEnvironment()
    if found.launcher == "torchrun":
        return TorchElasticEnvironment()
    if found.launcher == "env":
        return ExportedEnvironment()
    return LocalEnvironment()


def export(cluster: ClusterEnvironment, nodes: int, devices: int) -> None:
    """Set the variables that torchrun sets in each rank, which a module may read, in a rank that has none of them."""
    rank, world_size = cluster.global_rank(), cluster.world_size()
    if isinstance(cluster, LocalEnvironment):  # it learns them later
        rank, world_size = cluster.node_rank() * devices + cluster.local_rank(), nodes * devices
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(devices))
    elif type(cluster) is LightningEnvironment:  # it would take LOCAL_RANK for a sign that others have been started
        return
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("LOCAL_RANK", str(cluster.local_rank()))
    os.environ.setdefault("WORLD_SIZE", str(world_size))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(devices))


class LocalEnvironment(LightningEnvironment):
    """The environment of a process that starts the other ranks itself, at a port reserved against other processes."""

    def __init__(self) -> None:
        super().__init__()
        self._is_started = placement.is_child()

    @property
    def creates_processes_externally(self) -> bool:
        return self._is_started  # not by LOCAL_RANK, as Lightning, because every rank exports it

    def teardown(self) -> None:
        """Keep WORLD_SIZE, which Lightning would unset."""

    @property
    def main_port(self) -> int:
        if self._main_port == -1 and not os.environ.keys() & {"MASTER_PORT", "STANDALONE_PORT"}:
            held = reserve_port()
            weakref.finalize(self, held.close)
            self._main_port = held.getsockname()[1]
        return super().main_port


def reserve_port() -> socket.socket:
    """Return a socket that holds a free port for rank 0 until it is closed.

    Rank 0 listens seconds later, and until then the kernel may assign an unbound port to another process. It doesn't
    assign a bound port, but lets a process that requests this port listen there, as this socket doesn't listen and
    allows reuse.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


class ExportedEnvironment(TorchElasticEnvironment):
    """An environment like torchrun's, for processes without a LOCAL_RANK variable."""

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
        main_address: name or address of machine 0.
        main_port: a free port there.
    """
    os.environ.update(NODE_RANK=str(node_rank), MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    return LocalEnvironment()
