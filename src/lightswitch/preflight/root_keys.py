"""A config's own keys: those that are missing, of another type or out of range, or that nothing reads."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf, ValueNode, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightswitch.config import aliases
from lightswitch.config.overrides import AUTO, GROUPS, MODES, files_of_group, key_and_value, raw_keys, typed_overrides
from lightswitch.errors import listed, nearest
from lightswitch.preflight.targets import GIVEN, kinds_in_words, parameters

_NULL = type(None)
_NUMBER: tuple[type, ...] = (int, float)
_BY_KINDS: dict[tuple[type, ...], str] = {
    (str,): "name mode objective resume on_nan matmul_precision lr_scaling.rule",
    (str, int): "run_id",
    (str, _NULL): "init_from ckpt_path",
    (int,): "seed global_batch_size lr_scaling.reference_batch_size dry_run.steps check.steps check.devices",
    (int, _NULL): "micro_batch_size plan.tokens_per_sample sweep.jobs_at_once sweep.devices_per_job",
    _NUMBER: "meet_timeout_seconds watch.lost_after_seconds watch.hung_after_seconds",
    (*_NUMBER, _NULL): "plan.memory_gib",
    (bool,): "plan.deepspeed",
    (list,): "tags",
    (dict, _NULL): "init_names",
    (str, list, _NULL): "check.strategies",
    (int, list, _NULL): "dry_run.rank",
}
KINDS = {key: kinds for kinds, keys in _BY_KINDS.items() for key in keys.split()}
WORDS = {"micro_batch_size": (AUTO,)}  # in addition to values of its types
ALLOWED = {
    "mode": MODES,
    "on_nan": ("stop", "ignore"),
    "trainer.accelerator": ("auto", "gpu", "cuda", "mps", "cpu"),
    "matmul_precision": ("highest", "high", "medium"),
    "lr_scaling.rule": ("none", "linear", "sqrt"),
}
_SECONDS = (1.0, 2e6)  # 23 days; sockets and gloo count milliseconds in 32 bits
_RANGES = {
    "seed": (0, 2**32 - 1),  # NumPy's
    **dict.fromkeys(("global_batch_size", "micro_batch_size"), (1, math.inf)),
    **dict.fromkeys(("lr_scaling.reference_batch_size", "dry_run.steps", "plan.tokens_per_sample"), (1, math.inf)),
    **dict.fromkeys(("sweep.jobs_at_once", "sweep.devices_per_job"), (1, math.inf)),
    **dict.fromkeys(("check.steps", "check.devices"), (2, math.inf)),  # a step before a kill, and one after it
    "plan.memory_gib": (0.001, 1e6),
    "optimizer.lr": (0, math.inf),
    "watch.lost_after_seconds": (5, _SECONDS[1]),  # a rank may be silent for some seconds, while it compiles
}
_CLOSED = ("watch", "lr_scaling", "dry_run", "check", "sweep")  # nodes that have no other keys than the engine's
_OF_MODE = ("plan", "dry_run", "check", "sweep")  # nodes that other modes, or no sweep, need not have


def missing(cfg: DictConfig) -> Iterator[str]:
    """Yield the keys that the engine reads and an unresolved config, such as one of another project, does not have."""
    mode = cfg._get_node("mode")
    of_mode = {"plan": ("plan",), "dry_run": ("plan", "dry_run"), "check": ("check",)}.get(str(mode), ())
    keys = [key for key in KINDS if (node := key.partition(".")[0]) not in _OF_MODE or node in of_mode]
    nodes = dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
    for key in (*nodes, *keys, "model", "trainer", "trainer.devices", "trainer.num_nodes"):
        parent, _, name = key.rpartition(".")
        above = cfg._get_node(parent) if parent in raw_keys(cfg) else cfg if not parent else None
        if parent and isinstance(above, ValueNode) and not above._is_interpolation():
            yield f"{parent}={above._value()}: expected a group of keys; type {key}=VALUE"
        elif above is not None and name not in raw_keys(above):
            yield f"{key}: the config has no such key, and the engine reads it; add it to config.yaml"


def wrong(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the keys whose value is of the wrong type or out of range."""
    values = {key: value for key, value in _leaves(cfg, whole=KINDS) if not key.startswith(("model.", "data."))}
    for key, value in values.items():
        least, most = _RANGES.get(key, _SECONDS if key.endswith("_seconds") else (-math.inf, math.inf))
        kinds = _NUMBER if key == "optimizer.lr" else KINDS.get(key, (type(value),))
        if key not in KINDS and key.partition(".")[0] in _CLOSED:
            yield f"{key}: there is no such key.{nearest(key, [*KINDS])}"
        elif type(value) not in kinds and value not in WORDS.get(key, ()):
            yield f"{key}={value}: found {type(value).__name__}, expected {kinds_in_words(kinds)}"
        elif key in ALLOWED and value not in ALLOWED[key]:
            yield f"{key}={value}: use one of {', '.join(ALLOWED[key])}"
        elif type(value) in _NUMBER and not least <= value <= most:
            yield f"{key}={value}: use a number from {least:.10g}" + (f" to {most:.10g}" if most < math.inf else "")


def _leaves(node: Any, key: str = "", whole: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each value in a node with its dotted key.

    Args:
        whole: keys whose value may be a node.
    """
    if isinstance(node, dict) and key not in whole and (node or not key):
        for name, child in node.items():
            yield from _leaves(child, f"{key}.{name}".lstrip("."), whole)
    else:
        yield key, node


def unscaled_rate(cfg: DictConfig, plain: dict[str, Any]) -> Iterator[str]:
    """Yield a problem if lr_scaling is on, but there is no optimizer.lr, or the model does not refer to it."""
    rule = plain["lr_scaling"]["rule"]
    if rule != "none" and not isinstance(_rate(plain), int | float):
        yield f"lr_scaling.rule={rule} scales optimizer.lr, and there is none; give optimizer.lr=VALUE"
    elif rule != "none" and "model" not in _readers(cfg, "optimizer.lr", 2.0 * cfg.optimizer.lr):
        yield (
            f"lr_scaling.rule={rule} scales optimizer.lr, which nothing in model refers to; "
            "set the model's rate with 'model.lr=${optimizer.lr}' (or the model's name for it), or leave lr_scaling out"
        )


def _rate(cfg: dict[str, Any]) -> Any:
    node = cfg.get("optimizer")  # which may be any value of a project that has no such group
    return node.get("lr") if isinstance(node, dict) else None


# Nodes that a run reads. Any other node only matters if one of these refers to it, such as `${optimizer}` in model.
_READ_BY_A_RUN = {"model", "data", "trainer", "callbacks", "logger", "cluster", "compile", "device", "plan", "hydra"}
_READ_BY_A_RUN |= {key.partition(".")[0] for key in KINDS}
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
    names: dict[str, str] = {}  # of keys in messages
    choices: Any = hydra.runtime.choices
    for group in _FROM:
        if (choice := choices.get(group)) and (file := files_of_group(hydra, group).get(choice)):
            content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
            content.pop("defaults", None)
            names |= {key: f"{key} of {group}={choice}" for key, _ in _leaves(content)}
    typed = [key_and_value(word)[0] for word in typed_overrides(hydra) if not word.startswith("~")]
    names |= {key: key for key in typed if "@" not in key}
    found: dict[str, list[str]] = {}  # names by message
    for key, message in unread(cfg, names).items():
        found.setdefault(message, []).append(names[key])
    yield from (f"{listed(origins)}: {message}" for message, origins in found.items())


def unread(cfg: DictConfig, keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that nothing in a config reads, each with the reason and what to type instead."""
    return {key: message for key in keys if (message := _why_unread(cfg, key)) is not None}


def _why_unread(cfg: DictConfig, key: str) -> str | None:
    """Return why nothing reads a key, and what to type instead; None if something reads it."""
    for node, (switch, values, typed) in _WHEN.items():
        if f"{key}.".startswith(f"{node}."):
            return None if OmegaConf.select(cfg, switch) in values else f"it has no effect without {typed}"
    group = key.partition(".")[0]
    if group in _READ_BY_A_RUN or group not in cfg or cfg._get_node(group) is None:
        return None
    if _is_read(cfg, key, group) or _is_the_scripts(group):
        return None
    if group in _FROM:
        return f"the keys of its file are set below {group}; begin the file with # @package _global_"
    if group in GIVEN:
        return _of_model(cfg, group)
    meant = aliases.setting(key)
    hint = f" Did you mean {meant}?" if meant else nearest(key, sorted({*map(str, cfg), *GROUPS} - {key}), alike=0.65)
    return f"nothing refers to it, for example by ${{{key}}}; leave it out.{hint}".removesuffix(".")


def _is_read(cfg: DictConfig, key: str, group: str) -> bool:
    """Return whether a node that a run reads refers to a key; the config is resolved only if its text does not say."""
    content: Any = OmegaConf.to_container(cfg)
    others = {name: str(node) for name, node in content.items() if name != group}
    if any(f"${{{key}}}" in others.get(name, "") for name in _READ_BY_A_RUN):
        return True
    return any(group in text for text in others.values()) and bool(_readers(cfg, key, _NOBODYS))


def _readers(cfg: DictConfig, key: str, value: object) -> set[str]:
    """Return the nodes that a run reads, and that another value of a key changes."""
    other = cfg.copy()
    with open_dict(other):
        OmegaConf.update(other, key, value, force_add=True)
    try:
        before, after = (OmegaConf.to_container(one, resolve=True) for one in (cfg, other))
    except OmegaConfBaseException:  # something refers to it, and can't be resolved
        return {key}
    return {name for name in _READ_BY_A_RUN if before.get(name) != after.get(name)}  # type: ignore[union-attr]


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
