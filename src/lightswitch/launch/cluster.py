"""How the processes of a run find each other, as Lightning's ClusterEnvironment."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightswitch.launch import placement

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def detect() -> ClusterEnvironment:
    """The environment of the launcher that started this process.

    Lightning's own detection takes any shell in a Slurm job for a task of srun, and waits for the others for ever.
    """
    launcher = placement.detect().launcher
    if launcher == "slurm":
        return SLURMEnvironment()
    if launcher in ("torchrun", "env"):
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
    os.environ.setdefault("LOCAL_RANK", str(int(os.environ["RANK"]) % int(os.environ.get("LOCAL_WORLD_SIZE", 1 << 30))))
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "env")
    return TorchElasticEnvironment()


def by_hand(node_rank: int, main_address: str, main_port: int) -> ClusterEnvironment:
    """One command on each machine, which starts that machine's processes itself."""
    os.environ.update(NODE_RANK=str(node_rank), MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    return LightningEnvironment()
