"""What preflight says of a request, in this process: composed as train.py does, and checked without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.config.overrides import normalised
from lightswitch.context import RunContext
from lightswitch.errors import RefusedRequest
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.preflight.check import check
from lightswitch.process import Process, Signals
from tests.runs import CHECKOUT

ALONE = Placement("local")


@dataclass(frozen=True)
class Request:
    cfg: DictConfig
    hydra: HydraConf


@contextmanager
def composing() -> Iterator[None]:
    """Let `composed` read conf/."""
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        try:
            yield
        finally:
            HydraConfig.instance().cfg = None


def composed(*words: str, into: Path) -> Request:
    """Return the request that train.py would get of these words, of a run whose directory would be `into`."""
    register_resolvers(ALONE)
    fixed = ("run_id=composed", f"hydra.runtime.output_dir={into}")
    cfg = compose("config", [*normalised([*words]), *fixed], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    return Request(cfg, cfg.pop("hydra"))


def problems(request: Request, placement: Placement = ALONE) -> set[str]:
    """Return the lines with which the last composed request is refused; none where it would run."""
    register_resolvers(placement)
    process, folder = Process(), Path(request.hydra.runtime.output_dir)
    mode = str(request.cfg.get("mode"))
    run = RunContext(folder, "composed", mode, placement, request.hydra, process, Signals(process))
    try:
        check(request.cfg, run)
    except RefusedRequest as refused:
        return set(refused.problems)
    return set()
