"""Who started this process, and which one of how many it is: read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightswitch.launch.mistakes import Mistakes


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


def detect(environ: Mapping[str, str] = os.environ) -> Placement:
    """A process that Lightning started itself counts as local; its rank is then its LOCAL_RANK."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_counts("torchrun", environ)
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # set by srun alone; a batch script's own shell has it not
        return _from_slurm(environ)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return _from_counts("env", environ)
    rank = int(environ.get("LOCAL_RANK", 0)) + int(environ.get("NODE_RANK", 0))
    return Placement("local", rank=rank)


def _from_counts(launcher: str, environ: Mapping[str, str]) -> Placement:
    """
    Raises:
        Mistakes: a variable of one who exported them by hand is no number, or a rank is beyond the world.
    """
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank >= world:
        raise Mistakes([f"RANK={rank} and WORLD_SIZE={world}: export a RANK from 0 to {world - 1}"])
    local = max(1, _number(environ, "LOCAL_WORLD_SIZE", world))
    nodes = _number(environ, "GROUP_WORLD_SIZE", max(1, world // local))
    before = _number(environ, "GROUP_RANK", rank // local) * local  # ranks on the nodes before, were all like this one
    even = nodes * local == world and before <= rank < before + local
    return Placement(launcher, nodes, local, rank, None if even else f"{world} (here {local})")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, default)
    if not str(text).isdecimal():
        raise Mistakes([f"{name}={text}: export it as a number from 0"])
    return int(str(text))


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    nodes, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_STEP_NUM_TASKS"])
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # as in 3,2 or 4(x2),3
    uneven = per_node if "," in per_node else None
    return Placement("slurm", nodes, tasks // nodes, int(environ["SLURM_PROCID"]), uneven)
