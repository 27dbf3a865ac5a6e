"""Checks of a request to check a module: one process starts all runs, on the devices that are here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from lightswitch.cluster.placement import Placement
from lightswitch.config import aliases
from lightswitch.errors import nearest

MODE = "check"
_KEYS = ("steps", "devices", "strategies")
_LEAST_STEPS, _LEAST_DEVICES = 2, 2  # one before a kill, and one after it


def problems(cfg: dict[str, Any], place: Placement, strategies: Collection[str]) -> Iterator[str]:
    """Yield why a module can't be checked, a line each.

    Args:
        strategies: that the config folders have.
    """
    if place.is_external:
        yield (
            f"mode=check starts its own processes, and {place.launcher} started this one beside others; "
            "type python train.py mode=check"
        )
    node = cfg.get(MODE)
    if not isinstance(node, dict):
        yield "check: the config has no such key, and mode=check reads it; add it to config.yaml"
        return
    for key in (key for key in _KEYS if key not in node):
        yield f"check.{key}: the config has no such key, and mode=check reads it; add it to config.yaml"
        return
    for key, least in (("steps", _LEAST_STEPS), ("devices", _LEAST_DEVICES)):
        if type(node[key]) is not int or node[key] < least:
            yield f"check.{key}={node[key]}: use a number from {least}"
    asked = node["strategies"]
    if asked not in (None, "all"):
        for name in asked if isinstance(asked, list) else [asked]:
            if str(name) not in strategies:
                other = aliases.choice("strategy", str(name))
                hint = f" Did you mean {other}?" if other in strategies else nearest(str(name), strategies)
                known = ", ".join(strategies)
                yield f"check.strategies: there is no strategy {name}.{hint} Use all, or a list of {known}"
