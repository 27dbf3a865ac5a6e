"""The meeting of a run's processes: before they form a group, they must be the same."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from omegaconf import DictConfig
from torch._C._distributed_c10d import Store

from lightswitch.launch import agreement, claim, confidential, rendezvous
from lightswitch.launch.agreement import Evidence
from lightswitch.launch.confidential import Values
from lightswitch.launch.rendezvous import Place
from lightswitch.launch.sealed import Sealed
from lightswitch.launch.watch.callback import Watch
from lightswitch.refused import Refused, ToldElsewhere

_OTHERWISE_BY_DESIGN = ("cluster.",)  # by which each process finds the others
_LAG_SECONDS = 10.0  # until a file that another node wrote is seen on a shared file system
_PARTING_SECONDS = 5.0
_POLL_SECONDS = 0.01


def arrange(cfg: DictConfig, trainer: Trainer, watch: Watch) -> None:
    """Let the processes of a Trainer meet before its strategy makes a group of them, which then watches over itself.

    That group may hang at its first word where versions of NCCL differ, and at any other where something else does.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ParallelStrategy) and trainer.num_nodes * trainer.num_devices > 1:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        meeting = Meeting(
            trainer,
            strategy,
            trainer.num_nodes,
            run_dir,
            _evidence(cfg, trainer),
            confidential.values(cfg, without=_OTHERWISE_BY_DESIGN),
            cfg.meet_timeout_seconds,
            watch,
        )
        strategy.setup_environment = meeting  # type: ignore[method-assign]  # of this strategy alone


def _evidence(cfg: DictConfig, trainer: Trainer) -> Evidence:
    conf = [Path(source.path) for source in HydraConfig.get().runtime.config_sources if source.schema == "file"]
    code = [Path(sys.argv[0]).resolve(), *conf, *agreement.package(__name__)]
    for node in filter(None, (cfg.get("model"), cfg.get("data"))):
        code += agreement.package(node._target_)
    versions = agreement.software(on_gpu=isinstance(trainer.accelerator, CUDAAccelerator))
    return Evidence(versions, agreement.digests(code))


@dataclass
class Meeting:
    """Stands in for `setup_environment`, the first that a strategy does in each of its processes."""

    trainer: Trainer
    strategy: ParallelStrategy
    nodes: int
    run_dir: Path
    evidence: Evidence
    values: Values
    timeout_seconds: float
    watch: Watch
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
        self.watch.join(self.trainer)

    def _meet(self) -> Store:
        place = self._place()
        store = rendezvous.come(place, "meeting")
        is_spawned = isinstance(self.strategy.launcher, _MultiProcessingLauncher)
        verdict = agree(store, place, self.evidence, self.values, self.run_dir, tell=not is_spawned)
        if verdict and is_spawned:
            raise Refused(verdict)  # the process that started this one tells it
        if verdict:
            raise ToldElsewhere(verdict)
        return store

    def _place(self) -> Place:
        cluster, devices = self.strategy.cluster_environment, self.strategy.parallel_devices
        assert cluster is not None
        assert devices is not None
        rank = cluster.node_rank() * len(devices) + cluster.local_rank()
        world_size = self.nodes * len(devices)
        return Place(cluster.main_address, cluster.main_port, rank, world_size, self.timeout_seconds)


def agree(store: Store, place: Place, evidence: Evidence, values: Values, run_dir: Path, tell: bool) -> str:
    """What is wrong with the processes, in a line that each of them gets; nothing, if they agree.

    The store has versions, digests of code, and one keyed digest of all values, until everyone has been heard.

    Args:
        tell: rank 0 prints the line, before the others know it: the first one to exit may take all with it.
    """
    own = replace(evidence, rank=place.rank, node=socket.gethostname(), run_dir=str(run_dir.absolute()))
    verdict = (
        _judge(store, place, own, values, run_dir, tell) if place.rank == 0 else _attend(store, own, values, run_dir)
    )
    if store.add("heard", 1) == place.world_size and not verdict:  # the last one clears up
        store.delete_key("verdict")
        store.delete_key("heard")
    return verdict


def _judge(store: Store, place: Place, own: Evidence, values: Values, run_dir: Path, tell: bool) -> str:
    refusal = claim.refusal()
    sealed = Sealed.make(run_dir, values)
    try:
        own = replace(own, config=sealed.digest)
        store.set("config", own.config)
        store.set("folder", sealed.folder.name)
        store.set("0", _sent(own))
        missing = rendezvous.missing(store, place)
        verdict = refusal or (_waited(missing, place) if missing else _difference(store, place, sealed))
    finally:
        sealed.remove()
    if verdict and tell:
        print(f"error: {verdict}", file=sys.stderr, flush=True)
    if not verdict:
        for key in ("config", "folder", *map(str, range(place.world_size))):
            store.delete_key(key)
    store.set("verdict", verdict)
    if verdict:  # this process may be the one that serves the store
        _wait_until(lambda: store.add("heard", 0) + len(missing) + 1 >= place.world_size, _PARTING_SECONDS)
    return verdict


def _difference(store: Store, place: Place, sealed: Sealed) -> str:
    sent = store.multi_get([str(rank) for rank in range(place.world_size)])
    return agreement.difference([Evidence(**json.loads(one)) for one in sent], sealed.read) or ""


def _attend(store: Store, own: Evidence, values: Values, run_dir: Path) -> str:
    # a file system that lags keeps what it has once seen, so nobody looks before the file is written
    sealed = Sealed.find(run_dir, store.get("folder").decode(), values, _LAG_SECONDS)
    if sealed is not None:
        own = replace(own, config=sealed.digest)
        if own.config != store.get("config").decode():
            sealed.leave()
    store.set(str(own.rank), _sent(replace(own, sees_run_directory=sealed is not None)))
    return store.get("verdict").decode()


def _sent(evidence: Evidence) -> str:
    return json.dumps(asdict(evidence))


def _waited(missing: list[int], place: Place) -> str:
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks, from rank {missing[0]} on,"
    return (
        f"{ranks} of {place.world_size} did not come to {place.address}:{place.port} in {place.timeout_seconds:g} s; "
        f"look whether all were started, and what they say, or wait longer: "
        f"meet_timeout_seconds={2 * place.timeout_seconds:g}"
    )


def _wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True
