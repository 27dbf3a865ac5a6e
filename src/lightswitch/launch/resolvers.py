"""Values in conf/ that are known only when a run starts: `${new_run_id:}` and the like."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster import placement
from lightswitch.errors import RefusedRequest
from lightswitch.runs.run_id import new_run_id


def register() -> None:
    OmegaConf.register_new_resolver("new_run_id", lambda: new_run_id(), replace=True)
    OmegaConf.register_new_resolver("run_name", _run_name, replace=True)
    OmegaConf.register_new_resolver("launched_devices", lambda: placement.detect().devices_per_node or 1, replace=True)
    OmegaConf.register_new_resolver("launched_nodes", lambda: placement.detect().nodes, replace=True)


def _run_name(*, _root_: DictConfig) -> str:
    """The model's choice, or its class where it was named on the command line."""
    hydra = _root_.hydra if "hydra" in _root_ else HydraConfig.get()  # a sweep names its directory before it has jobs
    choice = hydra.runtime.choices.get("model")
    if choice is None and "model" not in _root_:
        raise RefusedRequest(
            ["model: the config has no such key, and the engine reads it; give it back to config.yaml"]
        )
    named = choice or str(_root_.model._target_).rpartition(".")[2].lower()
    return named.replace("/", "_")  # of a choice in a folder of its own
