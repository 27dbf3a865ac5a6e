"""Who started this process, and which one of how many it is: read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    launcher: str  # local, torchrun, slurm, env
    nodes: int = 1
    devices_per_node: int | None = None  # None: this process decides, and starts the others itself
    rank: int = 0
    uneven: str | None = None  # processes of each node, where they differ, as far as this process knows

    @property
    def is_external(self) -> bool:
        """Every process was started from outside."""
        return self.launcher != "local"


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # set by srun alone; a batch script's own shell has it not
        return "slurm"
    return "env" if environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"} else "local"


def detect(environ: Mapping[str, str] = os.environ) -> Placement:
    """Of variables that `checks.environment` has passed.

    A process that Lightning started itself counts as local; its rank is then its LOCAL_RANK.
    """
    found = launcher(environ)
    if found == "slurm":
        return _from_slurm(environ)
    if found != "local":
        return _from_counts(found, environ)
    return Placement("local", rank=int(environ.get("LOCAL_RANK", 0)) + int(environ.get("NODE_RANK", 0)))


def _from_counts(launcher: str, environ: Mapping[str, str]) -> Placement:
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local = int(environ.get("LOCAL_WORLD_SIZE", world))
    told = environ if launcher == "torchrun" else {}  # of nodes, as it calls them groups
    nodes = int(told.get("GROUP_WORLD_SIZE", max(1, world // local)))
    before = int(told.get("GROUP_RANK", rank // local)) * local  # ranks on the nodes before, were all like this one
    even = nodes * local == world and before <= rank < before + local
    return Placement(launcher, nodes, local, rank, None if even else f"{world} (here {local})")


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    nodes, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_STEP_NUM_TASKS"])
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # as in 3,2 or 4(x2),3
    uneven = per_node if "," in per_node else str(tasks) if tasks % nodes else None
    return Placement("slurm", nodes, tasks // nodes, int(environ["SLURM_PROCID"]), uneven)
