"""The handshake around a strategy's `setup_environment`: processes must match before they form a process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from lightswitch.errors import Refused, ReportedElsewhere
from lightswitch.failures.watchdog import Watchdog
from lightswitch.hooked_strategy import HookedStrategy


def arrange_handshake(
    cfg: DictConfig, run: RunContext, trainer: Trainer, strategy: HookedStrategy, watchdog: Watchdog
) -> None:
    """Have a strategy compare a Trainer's processes before it forms the process group, and join the watchdog after.

    A group may hang in its first collective if NCCL versions differ, and in any later one if code or config differ.
    """
    if not isinstance(strategy, ParallelStrategy) or trainer.num_nodes * trainer.num_devices == 1:
        return
    evidence = _evidence(cfg, run, trainer)
    have_met = False

    @contextmanager
    def meeting() -> Iterator[None]:
        nonlocal have_met
        store = None if have_met else _compare(run, _meeting_point(cfg, trainer, strategy), evidence)
        have_met = True
        yield  # the group is formed; until then, the store at its port is held
        del store
        watchdog.join(trainer)

    strategy.meeting = meeting


def _evidence(cfg: DictConfig, run: RunContext, trainer: Trainer) -> Evidence:
    conf = [Path(source.path) for source in run.hydra.runtime.config_sources if source.schema == "file"]
    code = [Path(sys.argv[0]).resolve(), *conf, *rendezvous.source_folders(__name__)]
    for node in filter(None, (cfg.get("model"), cfg.get("data"))):
        code += rendezvous.source_folders(node._target_)
    config = confidential.values(cfg, without=("cluster.",))  # by which each process finds the others
    versions = rendezvous.software(on_gpu=isinstance(trainer.accelerator, CUDAAccelerator))
    return {"versions": versions, "code": rendezvous.digests(code), "config": config}


def _meeting_point(cfg: DictConfig, trainer: Trainer, strategy: ParallelStrategy) -> MeetingPoint:
    cluster, devices = strategy.cluster_environment, strategy.parallel_devices
    assert cluster is not None
    assert devices is not None
    rank = cluster.node_rank() * len(devices) + cluster.local_rank()
    world_size = trainer.num_nodes * len(devices)
    return MeetingPoint(cluster.main_address, cluster.main_port, rank, world_size, cfg.meet_timeout_seconds)


def _compare(run: RunContext, point: MeetingPoint, evidence: Evidence) -> Store:
    """Compare this process with the others, and return the store at which they have met.

    Raises:
        Refused: the processes differ, or some did not connect in time.
    """
    met = run.process.meeting
    store = rendezvous.open_store(point, "meeting", met if isinstance(met, Meeting) else None)
    verdict = rendezvous.compare(store, point, evidence, run.run_dir, run.process.refusal)
    if verdict:
        # the first process of this node, which has started this one, prints it in the same terminal
        is_child = not run.placement.is_external and os.environ.get("LOCAL_RANK", "0") != "0"
        raise ReportedElsewhere(verdict) if is_child else Refused(verdict)
    return store
