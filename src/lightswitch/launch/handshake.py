"""The handshake around a strategy's `setup_environment`: processes must match before they form a process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig
from torch._C._distributed_c10d import Store

from lightswitch.cluster import rendezvous
from lightswitch.cluster.rendezvous import Evidence, Meeting, MeetingPoint
from lightswitch.config import confidential
from lightswitch.context import RunContext
from lightswitch.errors import LostRank, Refused, ReportedElsewhere
from lightswitch.failures.watchdog import Watchdog
from lightswitch.hooked_strategy import HookedStrategy

_DIFFERS_BY_DESIGN = ("cluster.",)  # how each process finds the others
_OF_LAUNCHER = ("trainer.devices", "trainer.strategy.devices")  # each node may have its own number of processes


def arrange_handshake(
    cfg: DictConfig, run: RunContext, trainer: Trainer, strategy: HookedStrategy, watchdog: Watchdog
) -> None:
    """Have a strategy compare a Trainer's processes before it forms the process group, and join the watchdog after.

    A group may hang in its first collective if NCCL versions differ, and in any later one if code or config differ.
    """
    if isinstance(strategy, ParallelStrategy) and trainer.num_nodes * trainer.num_devices > 1:
        evidence = _evidence(cfg, run, trainer)
        strategy.meeting = Handshake(trainer, strategy, run, evidence, cfg.meet_timeout_seconds, watchdog)


def _evidence(cfg: DictConfig, run: RunContext, trainer: Trainer) -> Evidence:
    conf = [Path(source.path) for source in run.hydra.runtime.config_sources if source.schema == "file"]
    code = [Path(sys.argv[0]).resolve(), *conf, *rendezvous.source_folders(__name__)]
    for node in filter(None, (cfg.get("model"), cfg.get("data"))):
        code += rendezvous.source_folders(node._target_)
    config = confidential.values(cfg, (*_DIFFERS_BY_DESIGN, *(_OF_LAUNCHER if run.placement.is_external else ())))
    versions = rendezvous.software(on_gpu=isinstance(trainer.accelerator, CUDAAccelerator))
    return {"versions": versions, "code": rendezvous.digests(code), "config": config}


@dataclass
class Handshake:
    """Context manager around `setup_environment`, the first method of a strategy that runs in each process."""

    trainer: Trainer
    strategy: ParallelStrategy
    run: RunContext
    evidence: Evidence
    timeout_seconds: float
    watchdog: Watchdog
    is_over: bool = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compare the processes before they form the process group, and join the watchdog after.

        Raises:
            Refused: the processes differ, or some did not connect in time.
            LostRank: this process does not see the checkpoint that rank 0 resumes from.
        """
        store = None if self.is_over else self._compare()  # held until the group, served at the same port, is formed
        self.is_over = True
        yield
        del store
        self.watchdog.join(self.trainer)
        self._agree_on_start()

    def _agree_on_start(self) -> None:
        """Check that all processes resume, or none: Lightning reads no checkpoint in a process that has none."""
        own = self.trainer.ckpt_path
        of_first = self.strategy.broadcast(own)
        if (own is None) != (of_first is None):
            one, other = (f"resumes from {path}" if path else "starts at step 0" for path in (own, of_first))
            raise LostRank(
                f"rank {self.trainer.global_rank} {one}, but rank 0 {other}: the file system of its node lags, or "
                "is not the same; start the run again"
            )

    def _compare(self) -> Store:
        point = self._meeting_point()
        met = self.run.process.meeting
        store = rendezvous.open_store(point, "meeting", met if isinstance(met, Meeting) else None)
        verdict = rendezvous.compare(store, point, self.evidence, self.run.run_dir, self.run.process.refusal)
        if verdict:
            raise ReportedElsewhere(verdict) if self._shares_a_terminal(point.rank) else Refused(verdict)
        return store

    def _shares_a_terminal(self, rank: int) -> bool:
        """Return whether what rank 0, or the first process of this node, prints is shown where this process prints."""
        cluster, launcher = self.strategy.cluster_environment, self.run.placement.launcher
        assert cluster is not None
        if launcher == "local":
            return cluster.node_rank() == 0 or cluster.local_rank() > 0
        return rank == 0 or launcher == "slurm" or (launcher == "torchrun" and cluster.node_rank() == 0)

    def _meeting_point(self) -> MeetingPoint:
        cluster, devices = self.strategy.cluster_environment, self.strategy.parallel_devices
        assert cluster is not None
        assert devices is not None
        rank = cluster.node_rank() * len(devices) + cluster.local_rank()
        world_size = self.trainer.num_nodes * len(devices)
        return MeetingPoint(cluster.main_address, cluster.main_port, rank, world_size, self.timeout_seconds)
