"""What differs where a run is only planned: its devices need not be here, and one process does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightswitch.cluster.placement import Placement

_KEYS = ("device", "memory_gib", "disk_gb_per_second", "tokens_per_sample")


def problems(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield why no plan can be made, a line each."""
    if place.is_external:
        yield (
            f"mode=plan is made by one process, and {place.launcher} started this one beside others; "
            "type python train.py mode=plan trainer.num_nodes=N trainer.devices=N"
        )
    node = cfg.get("plan")
    if not isinstance(node, dict):
        yield "plan: the config has no such key, and mode=plan reads it; add it to config.yaml"
        return
    for key in _KEYS:
        if key not in node:
            yield f"plan.{key}: the config has no such key, and mode=plan reads it; add it to config.yaml"
    for key in ("memory_gib", "disk_gb_per_second"):
        value = node.get(key)
        if value is not None and (type(value) not in (int, float) or value <= 0):
            yield f"plan.{key}={value}: use a number greater than 0"


def on_its_device(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config whose trainer has the accelerator that the plan's device is, here or not."""
    node = (cfg.get("plan") or {}).get("device") or {}
    if not str(node.get("_target_")).endswith(".Device"):
        return cfg
    return {**cfg, "trainer": {**cfg["trainer"], "accelerator": node.get("kind", "cuda")}}
