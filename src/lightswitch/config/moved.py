"""Configs of older versions: the new names of moved classes replace the old ones, and newer keys get default values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightswitch.context import RunContext

log = logging.getLogger(__name__)

# Old and new names of modules and classes in configs, and the version that drops the old names.
MOVED = {
    "lightswitch.checkpoints.trainable": "lightswitch.checkpoints.finetuning",
    "lightswitch.launch.cluster": "lightswitch.cluster.environments",
    "lightswitch.monitoring.judged": "lightswitch.monitoring.monitored",
    "lightswitch.monitoring.grad_norm": "lightswitch.monitoring.throughput",
    "lightswitch.monitoring.mlflow.MLflowRun": "lightning.pytorch.loggers.MLFlowLogger",
    "lightswitch.monitoring.trackers.MLflowRun": "lightning.pytorch.loggers.MLFlowLogger",
    "lightswitch.monitoring.trackers": "lightswitch.monitoring.metrics",
    "lightswitch.monitoring.profiler": "lightswitch.monitoring.step_timer",
    "lightswitch.strategies.auto": "lightswitch.strategies.ddp",
    "lightswitch.strategies.compilation": "lightswitch.strategies.units",
    "lightswitch.strategies.deepspeed": "lightswitch.deepspeed.strategy",
    "lightswitch.strategies.float8": "lightswitch.strategies.units",
    "lightswitch.strategies.fsdp1.FSDP1": "lightswitch.strategies.fsdp.FSDP",
    "lightswitch.strategies.single": "lightswitch.strategies.ddp",
}
_DROPPED_IF_NULL = ("auto_wrap_policy", "activation_checkpointing_policy")  # Lightning's defaults, and so the engine's
UNTIL = "0.3"
ADDED = {"compare": False, "matmul_precision": "highest", "on_nan": "stop", "tags": []}  # as in conf/config.yaml


def follow(cfg: DictConfig, run: RunContext) -> None:
    """Update an older config in place as `replace` does, and log advice on its names on rank 0."""
    renamed = replace(cfg)
    if renamed and run.placement.rank == 0:
        changes = [f"{key}._target_={name} is now {today(name)}" for key, name in renamed.items()]
        log.info(
            "advice     %s; change it in your config: lightswitch %s drops the old name", "; ".join(changes), UNTIL
        )


def replace(cfg: DictConfig) -> dict[str, str]:
    """Update old names and missing keys of a composed config in place; return the old names by their nodes' paths."""
    with open_dict(cfg):
        cfg.update({key: value for key, value in ADDED.items() if key not in cfg})
    nodes = [(path, values, name) for path, values, name in _nodes(cfg) if name.startswith("lightswitch.")]
    renamed = {path: name for path, _, name in nodes if today(name) != name}
    of_null = [(path, key) for path, values, _ in nodes for key in _DROPPED_IF_NULL if values.get(key, 0) is None]
    with read_write(cfg), open_dict(cfg):
        for path, name in renamed.items():
            OmegaConf.update(cfg, f"{path}._target_", today(name))
        for path, key in of_null:
            del OmegaConf.select(cfg, path)[key]
    return renamed


def _nodes(node: Any, path: str = "") -> Iterator[tuple[str, dict[Any, Any], str]]:
    """Yield the path, the values and the class of each node that names one, without resolving interpolations."""
    plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if isinstance(plain, dict) and isinstance(name := plain.get("_target_"), str):
        yield path, plain, name
    children: Any = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, child in children:
        yield from _nodes(child, f"{path}.{key}".lstrip("."))


def today(name: str) -> str:
    """Return the current name of a class or function that a config names."""
    module, _, attribute = name.rpartition(".")
    return MOVED.get(name) or (f"{MOVED[module]}.{attribute}" if module in MOVED else name)
