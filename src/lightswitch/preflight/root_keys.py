"""Keys at the top of a config: missing, misspelt, or with a value that means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, ValueNode

from lightswitch.batches.plan import scaled_learning_rate
from lightswitch.config import aliases
from lightswitch.config.overrides import GROUPS, key_and_value
from lightswitch.config.values import (
    ALLOWED,
    KINDS,
    LARGEST_INTEGER,
    LEAST_SECONDS,
    LEAST_SECONDS_OF_OTHERS,
    MOST_SECONDS,
    WORDS,
)
from lightswitch.errors import nearest
from lightswitch.preflight import targets

_WATCH_KEYS = ("lost_after_seconds", "hung_after_seconds")
_SCALING = ("rule", "reference_batch_size")
_READ = (
    *(*KINDS, "model", "trainer", "lr_scaling", "watch", "trainer.devices", "trainer.num_nodes"),
    *(f"lr_scaling.{key}" for key in _SCALING),
    *(f"watch.{key}" for key in _WATCH_KEYS),
)


def missing(cfg: DictConfig) -> Iterator[str]:
    """Yield the keys that the engine reads and a config lacks, as one of another project may, before anything is
    resolved."""
    for key in _READ:
        parent, _, name = key.rpartition(".")
        above = cfg._get_node(parent) if parent in _raw_keys(cfg) else cfg if not parent else None
        if parent and isinstance(above, ValueNode) and not above._is_interpolation():
            yield f"{parent}={above._value()}: it has keys of its own; type {key}=VALUE"
        elif above is not None and name not in _raw_keys(above):
            yield f"{key}: the config has no such key, and the engine reads it; add it to config.yaml"


def _raw_keys(node: Any) -> list[Any]:
    """Return the keys of a node without resolving their values, as `in` would."""
    return list(node.keys()) if isinstance(node, DictConfig) and not node._is_none() else []


def misspelt(cfg: dict[str, Any], overrides: list[str]) -> Iterator[str]:
    """Yield each `+key=` that resembles a key or a group there is; any other is a variable of the user's own.

    Args:
        cfg: resolved.
        overrides: as typed.
    """
    for override in overrides:
        key, _ = key_and_value(override)
        if override.startswith("+") and "." not in key and "@" not in key and "/" not in key:
            other = aliases.setting(key)
            hint = "" if key in GROUPS else nearest(key, GROUPS, alike=0.85)
            hint = (
                f" Did you mean {other}?" if other else hint or nearest(key, [known for known in cfg if known != key])
            )
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
        yield f"seed={cfg['seed']}: use one from 0 to {2**32 - 1}, as NumPy needs it"
    if not isinstance(tags := cfg.get("tags", []), list) or not all(type(tag) is str for tag in tags):
        yield f"tags={tags}: expected a list of words, as tags=[baseline,long]"
    yield from no_switch("compare", cfg.get("compare", False))  # a config of an earlier version has no such key
    yield from _unknown(cfg, "lr_scaling", _SCALING)
    yield from _unknown(cfg, "watch", _WATCH_KEYS)
    yield from _wrong_scaling(*(cfg["lr_scaling"][key] for key in _SCALING))
    lr = (cfg.get("optimizer") or {}).get("lr", 0.0)
    if type(lr) not in (int, float) or not lr >= 0:
        yield f"optimizer.lr={lr}: a learning rate is a number, at least 0"
    for key in _WATCH_KEYS:
        if type(seconds := cfg["watch"][key]) not in (int, float):
            yield f"watch.{key}={seconds}: found {type(seconds).__name__}, expected float or int"
    yield from _beyond_seconds(cfg)


def beyond_integers(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each whole number, anywhere in a resolved config, that 64 bits do not hold."""
    for key, value in _leaves(cfg):
        if type(value) is int and abs(value) > LARGEST_INTEGER:
            yield f"{key}: found a number of {len(str(abs(value)))} digits; use one of at most {LARGEST_INTEGER}"


def _beyond_seconds(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each time that is too short to work, or too long to be counted; those of model and data are their own."""
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
    """Yield that a value is neither true nor false."""
    if type(value) is not bool:
        yield f"{key}={value}: found {type(value).__name__}, expected true or false"


def _unknown(cfg: dict[str, Any], group: str, known: tuple[str, ...]) -> Iterator[str]:
    for key in cfg[group].keys() - set(known):
        yield f"{group}.{key}: there is no such key.{nearest(key, known)}"


def unscaled_rate(cfg: DictConfig, plain: dict[str, Any]) -> Iterator[str]:
    """Yield that a learning rate is to follow the global batch, and there is none, or nothing reads it."""
    rule = plain["lr_scaling"]["rule"]
    if rule == "none":
        return
    if not isinstance((plain.get("optimizer") or {}).get("lr"), int | float):
        yield f"lr_scaling.rule={rule} scales optimizer.lr, and there is none; give optimizer.lr=VALUE"
        return
    other = cfg.copy()
    other.optimizer.lr = 2.0 * cfg.optimizer.lr
    if OmegaConf.to_container(other.model, resolve=True) == plain["model"]:
        yield (
            f"lr_scaling.rule={rule} scales optimizer.lr, which nothing in model refers to; "
            "give the model its rate by 'model.lr=${optimizer.lr}', or the name it has there, or leave lr_scaling out"
        )


def _wrong_scaling(rule: str, reference_batch_size: int) -> Iterator[str]:
    if type(reference_batch_size) is not int or reference_batch_size < 1:
        yield f"lr_scaling.reference_batch_size={reference_batch_size}: it counts samples, so it is at least 1"
        return
    try:
        scaled_learning_rate(1.0, rule, 1, reference_batch_size)
    except ValueError as error:
        yield str(error)
