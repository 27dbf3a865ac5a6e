"""OmegaConf resolvers for values in conf/ that are known only when a run starts, such as `${new_run_id:}`."""

from __future__ import annotations

from collections.abc import Callable

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.errors import RefusedRequest
from lightswitch.preflight import own_batch
from lightswitch.runs.claim import new_run_id


def register(placement: Placement) -> None:
    """Register the resolvers, for a process with this placement."""
    resolvers: dict[str, Callable[..., object]] = {
        "new_run_id": _RunId(),
        "run_name": _run_name,
        "launched_devices": lambda: placement.devices_per_node or 1,
        "launched_nodes": lambda: placement.nodes,
        "unless": _unless,
        "steps_or_all": _steps_or_all,
        "own_batch": _own_batch,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


class _RunId:
    """The run id of this process, found once: a config is resolved more than once.

    submitit pickles resolvers, and what functools caches can't be.
    """

    def __init__(self) -> None:
        self._found: str | None = None

    def __call__(self) -> str:
        if self._found is None:
            self._found = new_run_id()
        return self._found


def _unless(value: object, otherwise: object, *siblings: str, _parent_: DictConfig) -> object:
    """Return a value, or another one where a key beside it is set: `${unless:500,-1,max_epochs}`."""
    return value if all(_parent_.get(name) is None for name in siblings) else otherwise


def _steps_or_all(steps: int, *, _parent_: DictConfig) -> int:
    """Return steps, or those of the whole run beside them where it is shorter: `${steps_or_all:250}`."""
    max_steps = _parent_.get("max_steps")
    return min(steps, max_steps) if isinstance(max_steps, int) and max_steps > 0 else steps


def _own_batch(otherwise: int, *, _root_: DictConfig) -> int:
    """Return the batch size that the data have themselves, or another: `${own_batch:64}`."""
    found = own_batch.of(_root_)
    return otherwise if found is None else found.size


def _run_name(*, _root_: DictConfig) -> str:
    """Return the choice of model, or its class if the command line named one."""
    hydra = _root_.hydra if "hydra" in _root_ else HydraConfig.get()  # while a sweep names its directory
    choice = hydra.runtime.choices.get("model")
    if choice is None and "model" not in _root_:
        told = "model: the config has no such key, and the engine reads it; add it to config.yaml"
        raise RefusedRequest([told])
    named = choice or str(_root_.model._target_).rpartition(".")[2].lower()
    return named.replace("/", "_")  # of a choice in a subfolder
