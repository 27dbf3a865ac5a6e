"""The launcher that started this process, and its rank, read from environment variables."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# 1 for elastic runs: otherwise torchrun's agents, in torch 2.4 to 2.13, keep the first group's address
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_OF_CHILDREN = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Placement:
    """The launcher, the number of processes that it started, and the rank of this one.

    Args:
        launcher: local, torchrun, slurm or env.
        devices_per_node: of this node; None if this process chooses the devices, and starts the other ranks itself.
    """

    launcher: str
    nodes: int = 1
    devices_per_node: int | None = None
    rank: int = 0

    @property
    def is_external(self) -> bool:
        """Whether a launcher outside of Python started every process."""
        return self.launcher != "local"


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the launcher that started this process."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # set by srun alone, in its tasks
        return "slurm"
    return "env" if environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"} else "local"


def detect(environ: Mapping[str, str] = os.environ) -> Placement:
    """Read the placement from variables that `preflight.devices` has checked.

    A process that Lightning started counts as local. Its rank is then LOCAL_RANK + NODE_RANK, which is 0 only in the
    run's first process.
    """
    found = launcher(environ)
    if found == "slurm":
        return _from_slurm(environ)
    if found != "local":
        return _from_counts(found, environ)
    return Placement("local", rank=int(environ.get("LOCAL_RANK", 0)) + int(environ.get("NODE_RANK", 0)))


def is_child(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether rank 0 of this node, which is no launcher's process, has started this one."""
    return "RANK" not in environ and environ.keys() >= _OF_CHILDREN


def elastic_nodes(environ: Mapping[str, str] = os.environ) -> range | None:
    """Return the numbers of nodes with which torchrun may continue (``--nnodes=MIN:MAX``); None if it isn't elastic."""
    if launcher(environ) != "torchrun":
        return None
    found = re.fullmatch(r"(\d+):(\d+)", _nodes_of_torchrun(environ))
    return range(int(found[1]), int(found[2]) + 1) if found and int(found[1]) < int(found[2]) else None


def _nodes_of_torchrun(environ: Mapping[str, str]) -> str:
    """Return torchrun's --nnodes from its command line, or else from PET_NNODES: it does not pass it to its workers."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except (OSError, UnicodeDecodeError):  # a system without /proc
        words = []
    options = list(itertools.takewhile(lambda word: not word.endswith(".py"), words))
    typed = re.findall(r"--nnodes[= ](\S+)", " ".join(options))
    return typed[-1] if typed else environ.get("PET_NNODES", "")


def _from_counts(launcher: str, environ: Mapping[str, str]) -> Placement:
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local = int(environ.get("LOCAL_WORLD_SIZE", world))
    nodes = int(environ.get("GROUP_WORLD_SIZE", -(-world // local)))  # torchrun calls nodes groups
    return Placement(launcher, nodes, local, rank)


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    tasks, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
    return Placement("slurm", nodes, tasks // nodes, int(environ["SLURM_PROCID"]))


# The environment variables that reports may show: no others, because they may hold passwords.
_REPORTED = re.compile(
    r"((LOCAL_|GROUP_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(CUDA|GLOO|MKL|NCCL|OMP|PYTORCH|SLURM|TORCH|TORCHELASTIC)_"
    r"(?!\w*(AUTH|CRED|JWT|KEY|PASS|SECRET|TOKEN))\w+)"
)
_PLAIN = re.compile(r"(?!.*://)[\w.,:;=/+*^()\[\] -]{0,200}")  # names, numbers and lists of them: no URL, no user@host


def reported_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are set, with `(not shown)` for values that may be URLs or logins."""
    found = {name: environ[name] for name in sorted(environ) if _REPORTED.fullmatch(name)}
    return {name: value if _PLAIN.fullmatch(value) else "(not shown)" for name, value in found.items()}
