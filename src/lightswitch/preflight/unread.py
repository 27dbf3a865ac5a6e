"""Keys that were typed, or that an experiment sets, and that nothing of the run reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightswitch.config import aliases, groups
from lightswitch.config.overrides import key_and_value, typed_overrides
from lightswitch.config.values import KINDS, KINDS_OF_OTHERS
from lightswitch.errors import listed
from lightswitch.preflight.targets import GIVEN, parameters

# What a run is made of. Any other node is there to be referred to, as `optimizer: ${optimizer}` of a model does.
_MADE = ("model", "data", "trainer", "callbacks", "logger", "cluster", "compile", "device", "plan", "hydra")
_READ = {*_MADE, *(key.partition(".")[0] for key in (*KINDS, *KINDS_OF_OTHERS))}
_WHEN = {  # keys that the engine reads in some runs alone: a key, the values it has there, and what to type
    "dry_run": ("mode", ("dry_run",), "mode=dry_run"),
    "check": ("mode", ("check",), "mode=check"),
    "lr_scaling.reference_batch_size": ("lr_scaling.rule", ("linear", "sqrt"), "lr_scaling.rule=linear or sqrt"),
}
_FROM = ("experiment", "debug")  # groups whose files set keys anywhere
_NOBODYS = "nobody's"  # the value by which a key's readers are found


def problems(cfg: DictConfig, hydra: HydraConf) -> Iterator[str]:
    """Yield what was typed or stands in an experiment, and is not read by what the config names: it would be passed
    over without a word.

    Args:
        cfg: unresolved, without Hydra's part; a config whose values can be resolved.
    """
    names, found = _keys(hydra), dict[str, list[str]]()  # by what is told of them
    for key, told in of(cfg, names).items():
        found.setdefault(told, []).append(names[key])
    yield from (f"{listed(origins)}: {told}" for told, origins in found.items())


def of(cfg: DictConfig, keys: Iterable[str]) -> dict[str, str]:
    """Return those of some keys of a config that nobody reads, each with why, and what is read instead."""
    return {key: told for key in keys if (told := _told(cfg, key)) is not None}


def _keys(hydra: HydraConf) -> dict[str, str]:
    """Return the keys of experiments, and those that were typed, each with how to name it."""
    choices: Any = hydra.runtime.choices
    found: dict[str, str] = {}
    for group in _FROM:
        if (choice := choices.get(group)) and (file := groups.files(hydra, group).get(choice)):
            found |= {key: f"{key} of {group}={choice}" for key in _keys_of(file)}
    for override in typed_overrides(hydra):
        key, _ = key_and_value(override)
        if not override.startswith("~") and "@" not in key:
            found[key] = key
    return found


def _keys_of(file: Path) -> Iterator[str]:
    """Yield the keys that a file of the whole config sets, and the groups whose choice it overrides."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for entry in content.pop("defaults", []):
        words = [str(word).removeprefix("override ") for word in entry] if isinstance(entry, dict) else []
        yield from (word.removeprefix("/") for word in words if not word.startswith("/hydra"))
    yield from _leaves(content)


def _leaves(node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _leaves(value, key)
        else:
            yield key


def _told(cfg: DictConfig, key: str) -> str | None:
    """Return why a key is read by nobody, and what is; None where somebody reads it."""
    for node, (switch, values, typed) in _WHEN.items():
        if f"{key}.".startswith(f"{node}."):
            return None if OmegaConf.select(cfg, switch) in values else f"nothing reads it without {typed}"
    group = key.partition(".")[0]
    if group in _READ or group not in cfg or cfg._get_node(group) is None:
        return None
    if _is_read(cfg, key) or _is_the_scripts(group):
        return None
    return _of_model(cfg, group) if group in GIVEN else f"nothing refers to it, as by ${{{key}}}; leave it out"


def _is_read(cfg: DictConfig, key: str) -> bool:
    """Return whether anything that a run is made of has another value where the key has."""
    other = cfg.copy()
    with open_dict(other):
        OmegaConf.update(other, key, _NOBODYS, force_add=True)
    try:
        return _read(other) != _read(cfg)
    except OmegaConfBaseException:  # what refers to it fails
        return True


def _read(cfg: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return {key: value for key, value in plain.items() if key in _READ}


def _is_the_scripts(key: str) -> bool:
    """Return whether the script itself reads a key, as that of a fork may."""
    script = Path(sys.argv[0])
    text = script.read_text(encoding="utf-8") if script.suffix == ".py" and script.is_file() else ""
    return re.search(rf"\bcfg\.{re.escape(key)}\b|\bcfg\[.{re.escape(key)}.\]", text) is not None


def _of_model(cfg: DictConfig, group: str) -> str:
    """Return that the model takes no optimizer or schedule of the config's, and what it takes."""
    target = str(OmegaConf.select(cfg, "model._target_"))
    name, takes = target.rpartition(".")[2], parameters(target)
    own_node: Any = OmegaConf.to_container(cfg.model, resolve=False)
    if isinstance(given := own_node.get(group), dict):
        settings = listed([f"model.{group}.{one}" for one in given if not one.startswith("_")], shown=6)
        return f"{name} has its own {group}; type {settings}, or 'model.{group}=${{{group}}}'"
    if group in takes:
        return f"{name} takes the {group} as an argument; type 'model.{group}=${{{group}}}'"
    own = [f"model.{one}" for one in sorted(takes, key=lambda one: aliases.setting(f"{group}.{one}") is None)]
    told = f"; its own: {listed(own, shown=6)}" if own else ", and has its own"
    return f"{name} takes no {group}{told}"
