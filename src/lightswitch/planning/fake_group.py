"""A process group and a cluster of which this process is one rank, and the others are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch._C._distributed_c10d import HashStore


@dataclass(frozen=True)
class World:
    """The processes of a run, and which of them is simulated."""

    nodes: int
    devices_per_node: int
    rank: int = 0

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices_per_node


def has_collectives() -> bool:
    """Return whether this torch has collectives for tensors without values; 2.8 has none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta")


@contextmanager
def fake_group(world: World) -> Iterator[None]:
    """Context with a default process group of a world, in which collectives leave tensors as they are."""
    told_by = sys.excepthook
    dist.init_process_group("fake", rank=world.rank, world_size=world.size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = told_by  # torch's names this rank before each line, once more for each group


class FakeCluster(ClusterEnvironment):
    """Cluster environment of a simulated world, whose processes Lightning takes to be started by someone else."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is given, and never found."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the world is given."""

    def global_rank(self) -> int:
        """Return the rank that is simulated."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is given."""

    def local_rank(self) -> int:
        """Return the rank within its node."""
        return self._world.rank % self._world.devices_per_node

    def node_rank(self) -> int:
        """Return the node of the rank."""
        return self._world.rank // self._world.devices_per_node
