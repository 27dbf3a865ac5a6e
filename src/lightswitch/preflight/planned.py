"""Checks for mode=plan, mode=dry_run and mode=check, which are each started as a single process."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightswitch.cluster.placement import Placement
from lightswitch.config import aliases
from lightswitch.errors import nearest
from lightswitch.preflight import devices

MODES = ("plan", "dry_run")
CHECK = "check"
_LEAST_STEPS, _LEAST_DEVICES = 2, 2  # at least one step before a kill, and one after it


def problems(cfg: dict[str, Any], place: Placement, precisions: Mapping[str, object]) -> Iterator[str]:
    """Yield the reasons why a run can't be planned, one line each.

    Args:
        precisions: precisions in the config folders, by name.
    """
    mode = cfg["mode"]
    if place.is_external:
        yield (
            f"mode={mode} runs in a single process, but {place.launcher} started several; "
            f"type python train.py mode={mode} trainer.num_nodes=N trainer.devices=N"
        )
    for key in ("memory_gib", "disk_gb_per_second", "tokens_per_sample"):
        value = cfg["plan"][key]
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            yield f"plan.{key}={value}: use a number greater than 0"
    if type(cfg["plan"]["deepspeed"]) is not bool:
        yield f"plan.deepspeed={cfg['plan']['deepspeed']}: use true or false"
    yield from _unknown_precisions(cfg["plan"].get("precisions"), precisions)  # an older config has no such key
    yield from of_disk(cfg["trainer"].get("strategy"))
    if mode == "dry_run":
        yield from _of_dry_run(cfg)


def of_disk(strategy: Any) -> Iterator[str]:
    """Yield why a strategy's memory can't be simulated, given its config node, if it offloads to disk."""
    if isinstance(strategy, Mapping) and "nvme" in strategy.values():
        yield (
            "what DeepSpeed offloads to disk is not simulated; plan strategy=deepspeed_stage_3_offload instead, which "
            "takes the same memory of each device, and as much of the host's as this one takes of the disk"
        )


def _unknown_precisions(asked: Any, known: Mapping[str, object]) -> Iterator[str]:
    if asked in (None, "all"):
        return
    for name in asked if isinstance(asked, list) else [asked]:
        if str(name) not in known:
            other = aliases.choice("precision", str(name))
            hint = f" Did you mean {other}?" if other in known else nearest(str(name), known)
            yield f"plan.precisions: there is no precision {name}.{hint} Use all, or a list of {', '.join(known)}"


def _of_dry_run(cfg: dict[str, Any]) -> Iterator[str]:
    node = cfg["dry_run"]
    world = cfg["trainer"]["num_nodes"] * devices.count(cfg["trainer"])
    for rank in ranks(node["rank"]):
        if type(rank) is not int:
            yield f"dry_run.rank={rank}: found {type(rank).__name__}, expected a number, or a list of numbers"
        elif not 0 <= rank < world:
            found = "one rank, 0" if world == 1 else f"{world} ranks; use one from 0 to {world - 1}"
            yield f"dry_run.rank={rank}: the world has {found}"
    if type(node["steps"]) is not int or node["steps"] < 1:
        yield f"dry_run.steps={node['steps']}: use a number from 1"


def ranks(asked: Any) -> list[Any]:
    """Return rank 0 and the configured ranks, without duplicates; `asked` is a number, a list or None."""
    found = [0, *(asked if isinstance(asked, list) else [] if asked is None else [asked])]
    return [one for index, one in enumerate(found) if one not in found[:index]]  # a list in a list has no hash


def on_its_device(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config whose Trainer uses the planned kind of device, even if this machine has none."""
    node = (cfg.get("plan") or {}).get("device") or {}
    if not str(node.get("_target_")).endswith(".Device"):
        return cfg
    return {**cfg, "trainer": {**cfg["trainer"], "accelerator": node.get("kind", "cuda")}}


def checked_problems(cfg: dict[str, Any], place: Placement, strategies: Collection[str]) -> Iterator[str]:
    """Yield the reasons why a module can't be checked, one line each.

    Args:
        strategies: names of the strategies in the config folders.
    """
    if place.is_external:
        yield (
            f"mode=check starts its own processes, but {place.launcher} started several; "
            "type python train.py mode=check"
        )
    node = cfg[CHECK]
    for key, least in (("steps", _LEAST_STEPS), ("devices", _LEAST_DEVICES)):
        if type(node[key]) is not int or node[key] < least:
            yield f"check.{key}={node[key]}: use a number from {least}"
    if (asked := node["strategies"]) is None:
        return
    named = [str(name) for name in (asked if isinstance(asked, list) else [asked])]
    if {*named} <= {"single"}:
        yield f"check.strategies={asked}: single is what a strategy is compared with; name another, or all"
    for name in (name for name in named if name != "all" and name not in strategies):
        other = aliases.choice("strategy", name)
        hint = f" Did you mean {other}?" if other in strategies else nearest(name, strategies)
        yield f"check.strategies: there is no strategy {name}.{hint} Use all, or a list of {', '.join(strategies)}"
