"""The meeting of a run's processes: before they form a group, they must be the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from omegaconf import DictConfig
from torch._C._distributed_c10d import Store

from lightswitch.cluster import consistency, rendezvous
from lightswitch.cluster.consistency import Evidence
from lightswitch.cluster.handshake import agree
from lightswitch.cluster.rendezvous import MeetingPoint
from lightswitch.cluster.sealed import Values
from lightswitch.config import confidential
from lightswitch.context import RunContext
from lightswitch.errors import Refused, ToldElsewhere
from lightswitch.fault_tolerance.watchdog.callback import Watchdog

_OTHERWISE_BY_DESIGN = ("cluster.",)  # by which each process finds the others


def arrange(cfg: DictConfig, run: RunContext, trainer: Trainer, watchdog: Watchdog) -> None:
    """Let the processes of a Trainer meet before its strategy makes a group of them, which then watches over itself.

    That group may hang at its first word where versions of NCCL differ, and at any other where something else does.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ParallelStrategy) and trainer.num_nodes * trainer.num_devices > 1:
        meeting = Meeting(
            trainer,
            strategy,
            trainer.num_nodes,
            run,
            _evidence(cfg, run, trainer),
            confidential.values(cfg, without=_OTHERWISE_BY_DESIGN),
            cfg.meet_timeout_seconds,
            watchdog,
        )
        strategy.setup_environment = meeting  # type: ignore[method-assign]  # of this strategy alone


def _evidence(cfg: DictConfig, run: RunContext, trainer: Trainer) -> Evidence:
    conf = [Path(source.path) for source in run.hydra.runtime.config_sources if source.schema == "file"]
    code = [Path(sys.argv[0]).resolve(), *conf, *consistency.source_folders(__name__)]
    for node in filter(None, (cfg.get("model"), cfg.get("data"))):
        code += consistency.source_folders(node._target_)
    versions = consistency.software(on_gpu=isinstance(trainer.accelerator, CUDAAccelerator))
    return Evidence(versions, consistency.digests(code))


@dataclass
class Meeting:
    """Stands in for `setup_environment`, the first that a strategy does in each of its processes."""

    trainer: Trainer
    strategy: ParallelStrategy
    nodes: int
    run: RunContext
    evidence: Evidence
    values: Values
    timeout_seconds: float
    watchdog: Watchdog
    is_over: bool = False

    def __call__(self) -> None:
        """
        Raises:
            Refused: the processes differ, or do not come together.
        """
        served = None if self.is_over else self._meet()  # until there is a group, which is served at the same port
        self.is_over = True
        type(self.strategy).setup_environment(self.strategy)
        del served
        self.watchdog.join(self.trainer)

    def _meet(self) -> Store:
        point = self._meeting_point()
        store = rendezvous.open_store(point, "meeting")
        is_spawned = isinstance(self.strategy.launcher, _MultiProcessingLauncher)
        verdict = agree(
            store,
            point,
            self.evidence,
            self.values,
            self.run.run_dir,
            tell=not is_spawned,
            refusal=self.run.process.refusal,
        )
        if verdict and is_spawned:
            raise Refused(verdict)  # the process that started this one tells it
        if verdict:
            raise ToldElsewhere(verdict)
        return store

    def _meeting_point(self) -> MeetingPoint:
        cluster, devices = self.strategy.cluster_environment, self.strategy.parallel_devices
        assert cluster is not None
        assert devices is not None
        rank = cluster.node_rank() * len(devices) + cluster.local_rank()
        world_size = self.nodes * len(devices)
        return MeetingPoint(cluster.main_address, cluster.main_port, rank, world_size, self.timeout_seconds)
