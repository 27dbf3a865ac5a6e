"""Checks of a config's keys: missing, misspelt, with an invalid value, or not read by anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf, ValueNode, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightswitch.batches.plan import scaled_learning_rate
from lightswitch.config import aliases
from lightswitch.config.overrides import GROUPS, key_and_value, typed_overrides
from lightswitch.config.values import (
    ALLOWED,
    KINDS,
    KINDS_OF_OTHERS,
    LEAST_SECONDS,
    LEAST_SECONDS_OF_OTHERS,
    MOST_SECONDS,
    WORDS,
    files_of_group,
)
from lightswitch.errors import listed, nearest
from lightswitch.preflight import targets
from lightswitch.preflight.targets import GIVEN, parameters

_WATCH_KEYS = ("lost_after_seconds", "hung_after_seconds")
_SCALING = ("rule", "reference_batch_size")
_READ = (
    *(*KINDS, "model", "trainer", "lr_scaling", "watch", "trainer.devices", "trainer.num_nodes"),
    *(f"lr_scaling.{key}" for key in _SCALING),
    *(f"watch.{key}" for key in _WATCH_KEYS),
)
_PLANNED = ("device", "memory_gib", "deepspeed", "disk_gb_per_second", "tokens_per_sample")
_OF_A_PLAN = ("plan", *(f"plan.{key}" for key in _PLANNED))
_READ_BY_MODE = {
    "plan": _OF_A_PLAN,
    "dry_run": (*_OF_A_PLAN, "dry_run", "dry_run.rank", "dry_run.steps"),
    "check": ("check", "check.steps", "check.devices", "check.strategies"),
}


def missing(cfg: DictConfig) -> Iterator[str]:
    """Yield the keys that the engine reads and an unresolved config, such as one of another project, does not have."""
    raw: Any = OmegaConf.to_container(cfg)
    for key in (*_READ, *_READ_BY_MODE.get(str(raw.get("mode")), ())):
        parent, _, name = key.rpartition(".")
        above = cfg._get_node(parent) if parent in _raw_keys(cfg) else cfg if not parent else None
        if parent and isinstance(above, ValueNode) and not above._is_interpolation():
            yield f"{parent}={above._value()}: expected a group of keys; type {key}=VALUE"
        elif above is not None and name not in _raw_keys(above):
            yield f"{key}: the config has no such key, and the engine reads it; add it to config.yaml"


def _raw_keys(node: Any) -> list[Any]:
    """Return the keys of a node without resolving their values, which `in` would do."""
    return list(node.keys()) if isinstance(node, DictConfig) and not node._is_none() else []


def misspelt(cfg: dict[str, Any], overrides: list[str]) -> Iterator[str]:
    """Yield each `+key=` that resembles an existing key or group; any other is taken as a variable of the user.

    Args:
        cfg: resolved config.
        overrides: as typed.
    """
    for override in overrides:
        key, value = key_and_value(override)
        if override.startswith("+") and "." not in key and "@" not in key and "/" not in key:
            other = aliases.instead(key, value) if aliases.setting(key) else None
            hint = "" if key in GROUPS else nearest(key, GROUPS, alike=0.85)
            hint = f" Type {other}" if other else hint or nearest(key, [known for known in cfg if known != key])
            if hint:
                yield f"{key}: there is no such key.{hint}"


def wrong(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the keys whose value is of the wrong type or out of range."""
    for key, kinds in KINDS.items():
        if type(cfg[key]) not in kinds and cfg[key] not in WORDS.get(key, ()):
            yield f"{key}={cfg[key]}: found {type(cfg[key]).__name__}, expected {targets.names(kinds)}"
    for key, allowed in ALLOWED.items():
        if cfg[key] not in allowed:
            yield f"{key}={cfg[key]}: use one of {', '.join(allowed)}"
    if type(cfg["seed"]) is int and not 0 <= cfg["seed"] < 2**32:
        yield f"seed={cfg['seed']}: use a number from 0 to {2**32 - 1}, as NumPy requires"
    if not isinstance(tags := cfg.get("tags", []), list) or not all(type(tag) is str for tag in tags):
        yield f"tags={tags}: expected a list of words, such as tags=[baseline,long]"
    yield from no_switch("compare", cfg.get("compare", False))  # a config of an earlier version has no such key
    yield from _unknown(cfg, "lr_scaling", _SCALING)
    yield from _unknown(cfg, "watch", _WATCH_KEYS)
    yield from _wrong_scaling(*(cfg["lr_scaling"][key] for key in _SCALING))
    lr = _rate(cfg, 0.0)
    if type(lr) not in (int, float) or not lr >= 0:
        yield f"optimizer.lr={lr}: expected a number of at least 0"
    for key in _WATCH_KEYS:
        if type(seconds := cfg["watch"][key]) not in (int, float):
            yield f"watch.{key}={seconds}: found {type(seconds).__name__}, expected float or int"
    yield from _beyond_seconds(cfg)


def _beyond_seconds(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each `*_seconds` value that is too small or too large, except in model and data."""
    for key, value in _leaves({name: node for name, node in cfg.items() if name not in ("model", "data")}):
        least = LEAST_SECONDS.get(key, LEAST_SECONDS_OF_OTHERS)
        if key.endswith("_seconds") and type(value) in (int, float) and not least <= value <= MOST_SECONDS:
            yield f"{key}={value}: use a number of seconds from {least} to {MOST_SECONDS}"


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(child, f"{key}.{name}".lstrip("."))
    else:
        yield key, node


def no_switch(key: str, value: object) -> Iterator[str]:
    """Yield a problem if a value is neither true nor false."""
    if type(value) is not bool:
        yield f"{key}={value}: found {type(value).__name__}, expected true or false"


def _unknown(cfg: dict[str, Any], group: str, known: tuple[str, ...]) -> Iterator[str]:
    for key in cfg[group].keys() - set(known):
        yield f"{group}.{key}: there is no such key.{nearest(key, known)}"


def unscaled_rate(cfg: DictConfig, plain: dict[str, Any]) -> Iterator[str]:
    """Yield a problem if lr_scaling is on, but there is no optimizer.lr, or the model does not refer to it."""
    rule = plain["lr_scaling"]["rule"]
    if rule == "none":
        return
    if not isinstance(_rate(plain), int | float):
        yield f"lr_scaling.rule={rule} scales optimizer.lr, and there is none; give optimizer.lr=VALUE"
        return
    other = cfg.copy()
    other.optimizer.lr = 2.0 * cfg.optimizer.lr
    if OmegaConf.to_container(other.model, resolve=True) == plain["model"]:
        yield (
            f"lr_scaling.rule={rule} scales optimizer.lr, which nothing in model refers to; "
            "set the model's rate with 'model.lr=${optimizer.lr}' (or the model's name for it), or leave lr_scaling out"
        )


def _rate(cfg: dict[str, Any], default: object = None) -> Any:
    node = cfg.get("optimizer")  # which may be any value of a project that has no such group
    return node.get("lr", default) if isinstance(node, dict) else default


def _wrong_scaling(rule: str, reference_batch_size: int) -> Iterator[str]:
    if type(reference_batch_size) is not int or reference_batch_size < 1:
        yield f"lr_scaling.reference_batch_size={reference_batch_size}: expected a number of samples, at least 1"
        return
    try:
        scaled_learning_rate(1.0, rule, 1, reference_batch_size)
    except ValueError as error:
        yield str(error)


# Nodes that a run reads. Any other node only matters if one of these refers to it, such as `${optimizer}` in model.
_MADE = ("model", "data", "trainer", "callbacks", "logger", "cluster", "compile", "device", "plan", "hydra")
_READ_BY_A_RUN = {*_MADE, *(key.partition(".")[0] for key in (*KINDS, *KINDS_OF_OTHERS))}
_WHEN = {  # keys that are read only if another key has certain values: that key, the values, and what to type
    "dry_run": ("mode", ("dry_run",), "mode=dry_run"),
    "check": ("mode", ("check",), "mode=check"),
    "lr_scaling.reference_batch_size": ("lr_scaling.rule", ("linear", "sqrt"), "lr_scaling.rule=linear or sqrt"),
}
_FROM = ("experiment", "debug")  # groups whose files may set any key
_NOBODYS = "nobody's"  # a value set for a key, to find out what reads the key


def unread_problems(cfg: DictConfig, hydra: HydraConf) -> Iterator[str]:
    """Yield the keys from the command line, an experiment or a debug config that nothing reads.

    They would be ignored silently.

    Args:
        cfg: unresolved, without Hydra's node; its values can be resolved.
    """
    names, found = _keys(hydra), dict[str, list[str]]()  # keys by message
    for key, message in unread(cfg, names).items():
        found.setdefault(message, []).append(names[key])
    yield from (f"{listed(origins)}: {message}" for message, origins in found.items())


def unread(cfg: DictConfig, keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that nothing in a config reads, each with the reason and what to type instead."""
    return {key: message for key in keys if (message := _told(cfg, key)) is not None}


def _keys(hydra: HydraConf) -> dict[str, str]:
    """Return the keys set by an experiment, a debug config or the command line, each with its name in messages."""
    choices: Any = hydra.runtime.choices
    found: dict[str, str] = {}
    for group in _FROM:
        if (choice := choices.get(group)) and (file := files_of_group(hydra, group).get(choice)):
            found |= {key: f"{key} of {group}={choice}" for key in _keys_of(file)}
    for override in typed_overrides(hydra):
        key, _ = key_and_value(override)
        if not override.startswith("~") and "@" not in key:
            found[key] = key
    return found


def _keys_of(file: Path) -> Iterator[str]:
    """Yield the keys that a file sets anywhere in the config, and the groups whose choice it overrides."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for entry in content.pop("defaults", []):
        words = [str(word).removeprefix("override ") for word in entry] if isinstance(entry, dict) else []
        yield from (word.removeprefix("/") for word in words if not word.startswith("/hydra"))
    yield from _leaf_keys(content)


def _leaf_keys(node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _leaf_keys(value, key)
        else:
            yield key


def _told(cfg: DictConfig, key: str) -> str | None:
    """Return why nothing reads a key, and what to type instead; None if something reads it."""
    for node, (switch, values, typed) in _WHEN.items():
        if f"{key}.".startswith(f"{node}."):
            return None if OmegaConf.select(cfg, switch) in values else f"it has no effect without {typed}"
    group = key.partition(".")[0]
    if group in _READ_BY_A_RUN or group not in cfg or cfg._get_node(group) is None:
        return None
    if _is_read(cfg, key) or _is_the_scripts(group):
        return None
    if group in _FROM:
        return f"the keys of its file are set below {group}; begin the file with # @package _global_"
    return _of_model(cfg, group) if group in GIVEN else f"nothing refers to it, for example by ${{{key}}}; leave it out"


def _is_read(cfg: DictConfig, key: str) -> bool:
    """Return whether another value of a key changes anything that a run reads."""
    other = cfg.copy()
    with open_dict(other):
        OmegaConf.update(other, key, _NOBODYS, force_add=True)
    try:
        return _read(other) != _read(cfg)
    except OmegaConfBaseException:  # something refers to it, and can't be resolved
        return True


def _read(cfg: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return {key: value for key, value in plain.items() if key in _READ_BY_A_RUN}


def _is_the_scripts(key: str) -> bool:
    """Return whether the main script itself reads a key, as train.py in a fork may do."""
    script = Path(sys.argv[0])
    text = script.read_text(encoding="utf-8") if script.suffix == ".py" and script.is_file() else ""
    return re.search(rf"\bcfg\.{re.escape(key)}\b|\bcfg\[.{re.escape(key)}.\]", text) is not None


def _of_model(cfg: DictConfig, group: str) -> str:
    """Return the message that the model does not use the config's optimizer or scheduler, with what it accepts."""
    target = str(OmegaConf.select(cfg, "model._target_"))
    name, takes = target.rpartition(".")[2], parameters(target)
    own_node: Any = OmegaConf.to_container(cfg.model, resolve=False)
    if isinstance(given := own_node.get(group), dict):
        settings = listed([f"model.{group}.{one}" for one in given if not one.startswith("_")], shown=6)
        return f"{name} has its own {group}; type {settings}, or 'model.{group}=${{{group}}}'"
    if group in takes:
        return f"{name} takes the {group} as an argument; type 'model.{group}=${{{group}}}'"
    own = [f"model.{one}" for one in sorted(takes, key=lambda one: aliases.setting(f"{group}.{one}") is None)]
    message = f"; its arguments: {listed(own, shown=6)}" if own else "; it creates one itself"
    return f"{name} takes no {group}{message}"
