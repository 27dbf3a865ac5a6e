"""Checks of config nodes that name code: that they name some, and its arguments by its signature, once imported."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Set
from typing import Any

from lightswitch.config import aliases
from lightswitch.errors import listed, nearest
from lightswitch.preflight.signatures import Parameter, Signature, signature

# Keys of nodes that the engine reads, and that are not arguments of the node's code
ENGINE_KEYS = {"data": ("sharded_by",)}
_SCHEDULES = "torch.optim.lr_scheduler."  # called with the optimizer, and nothing else
_STRATEGIES = {  # strategies with options, simplest first
    "ddp": "lightswitch.strategies.ddp.DDP",
    "fsdp": "lightswitch.strategies.fsdp.FSDP",
    "fsdp_tp": "lightswitch.strategies.tensor_parallel.TensorParallel",
    "deepspeed_stage_2": "lightswitch.deepspeed.strategy.DeepSpeed",
}
Choices = Mapping[str, Container[str]]  # by group
GIVEN = ("optimizer", "scheduler")  # groups of the config that a model may take as an argument of the same name
_HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def unnamed(cfg: dict[str, Any], choices: Choices) -> Iterator[str]:
    """Yield the nodes of a resolved config that name no code, which needs no import of any.

    Args:
        choices: those of the groups callbacks and logger.
    """
    needed = ("model",) if cfg.get("data") is None else ("model", "data")
    for key in needed:
        if not (isinstance(cfg[key], dict) and "_target_" in cfg[key]):
            yield f"{key}: it names no class; type {key}._target_=my.Class, or choose another config"
    for group in choices.keys() & cfg.keys():
        yield from _unfinished_nodes(group, cfg[group] or {}, choices[group])


def problems(cfg: dict[str, Any], keys: Set[str]) -> Iterator[str]:
    """Yield the arguments that the code named by a config does not accept, and the required ones that are missing.

    Args:
        cfg: resolved config.
        keys: top-level nodes to check, whose code is imported.
    """
    for key in (key for key in cfg if key in keys):
        yield from _node_problems(key, cfg[key], cfg)


def parameters(target: str) -> dict[str, Parameter]:
    """Return the parameters of the code at a dotted path, which is imported; empty if there is no such code."""
    try:
        found = signature(target)
    except LookupError:
        return {}
    return found.parameters if found else {}


def _unfinished_nodes(group: str, nodes: Any, choices: Container[str]) -> Iterator[str]:
    if not isinstance(nodes, dict):
        yield f"{group}: found {names((type(nodes),))}, expected a name for each; type {group}.NAME._target_=my.Class"
        return
    whole = [name for name, node in nodes.items() if node is None or (isinstance(node, dict) and "_target_" in node)]
    for name in (name for name in nodes if name not in whole):
        key, value = next(iter(nodes[name].items()), ("", "")) if isinstance(nodes[name], dict) else ("", "")
        if message := aliases.instead(f"{group}.{name}.{key}", as_typed(value)):
            yield f"{group}.{name}.{key}: there is no such key; {aliases.advice(message)}"
        elif name in choices:
            yield f"{group}.{name} is not switched on. To switch it on: {group}=[default,{name}]"
        else:
            hint = nearest(name, whole, alike=0.65)
            yield f"{group}.{name} names no class.{hint} For your own class: {group}.{name}._target_=my.Class"


def _node_problems(path: str, node: Any, cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a node that names code, and of the nodes inside it."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _node_problems(f"{path}.{index}", item, cfg)
    if not isinstance(node, dict):
        return
    for key, value in node.items() if node.get("_recursive_", True) else ():  # else the code gets configs of others
        yield from _node_problems(f"{path}.{key}", value, cfg)
    if isinstance(node.get("_target_"), str):
        yield from _against_signature(path, node, cfg)


def _against_signature(path: str, node: dict[str, Any], cfg: dict[str, Any]) -> Iterator[str]:
    try:
        accepted = signature(node["_target_"])
    except LookupError as error:
        yield f"{path}._target_={node['_target_']}: {error.args[0]}"
        return
    if accepted is None:
        return
    yield from _missing(path, node, accepted)
    for key, value in node.items():
        if key in _HYDRA_KEYS or key in ENGINE_KEYS.get(path, ()):
            continue
        if key not in accepted.parameters:
            yield from _unknown(path, key, accepted, node, cfg)
        elif path == "model" and key in GIVEN and _is_in_pieces(value, accepted.parameters[key]):
            yield f"{path}.{key}: found {', '.join(value)} but no _target_; type {key}.{next(iter(value))}=VALUE"
        elif key not in accepted.passed_on and not _fits(value, accepted.parameters[key]):
            problem = f"{path}.{key}={'null' if value is None else value}: {_misfit(value, accepted.parameters[key])}"
            is_text = set(accepted.parameters[key].kinds or ()) - {type(None)} == {str} and type(value) in (int, float)
            yield f"{problem}; type '{path}.{key}=\"{value}\"'" if is_text else problem


def _missing(path: str, node: dict[str, Any], accepted: Signature) -> Iterator[str]:
    is_schedule = str(node["_target_"]).startswith(_SCHEDULES)
    if "_args_" in node or (node.get("_partial_") and not is_schedule):
        return
    for key in accepted.parameters:
        if key in accepted.required and key not in node and not (is_schedule and key == "optimizer"):
            yield f"{path}.{key}: {_short(node)} needs it; give {path}.{key}=VALUE"


def _unknown(path: str, key: str, accepted: Signature, node: dict[str, Any], cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for an argument that the code does not accept.

    Code with **kwargs passes unknown arguments on, often to be ignored silently; for such code, only a likely
    misspelling is refused.
    """
    value = as_typed(node[key])
    argument = aliases.argument(path, key, accepted.parameters)
    other = f"{path}.{argument}" if argument else _of_group(path, key, node, accepted, cfg)
    known = f"{other}={value}" if other else None if accepted.open_ended else _elsewhere(f"{path}.{key}", value)
    if known:
        yield f"{path}.{key}: {_short(node)} takes no {key}; {aliases.advice(known)}"
        return
    own = [one for one in accepted.parameters if one not in accepted.passed_on and not _are_numbered(one, key)]
    hint = nearest(key, own, alike=0.85)
    if key in GIVEN and accepted.parameters and not accepted.open_ended:
        hint = f" Its arguments: {listed([f'{path}.{one}' for one in accepted.parameters], shown=6)}"
    elif not (hint or accepted.open_ended):
        hint = nearest(key, accepted.parameters)
        if not hint and path in ("model", "data"):
            hint = f" Its arguments: {listed([f'{path}.{one}' for one in accepted.parameters], shown=6)}"
    if hint or not accepted.open_ended:
        yield f"{path}.{key}: {_short(node)} takes no {key}.{hint}"


def _are_numbered(one: str, other: str) -> bool:
    """Return whether two arguments differ in numbers alone: `width2` is no misspelt `width1`."""
    return re.sub(r"\d+", "", one) == re.sub(r"\d+", "", other)


def _is_in_pieces(value: Any, parameter: Parameter) -> bool:
    """Return whether overrides such as `model.optimizer.lr=0.1` have replaced `${optimizer}` as an argument's value."""
    takes_dict = re.search(r"dict|mapping|config", parameter.annotation + str(parameter.default), re.IGNORECASE)
    return isinstance(value, dict) and bool(value) and "_target_" not in value and not takes_dict


def _of_group(path: str, key: str, node: dict[str, Any], accepted: Signature, cfg: dict[str, Any]) -> str | None:
    """Return the config key that sets an argument known from other models; None if there is none.

    For `model.lr` of a model that takes an optimizer, that is `optimizer.lr`, or `model.optimizer.lr` if the model's
    optimizer is not the config's.
    """
    setting = aliases.setting(key)
    group = (setting or "").partition(".")[0]
    if path != "model" or group not in accepted.parameters:
        return None
    return setting if node.get(group) in (None, cfg.get(group)) else f"{path}.{setting}"


def _elsewhere(key: str, value: str) -> str | None:
    """Return what to type for an argument of another framework, or of another strategy; None if it is unknown."""
    known = aliases.instead(key, value)
    setting = known or f"{key}={value}"
    option = setting.removeprefix("trainer.strategy.").partition("=")[0]
    for strategy, target in _STRATEGIES.items() if setting.startswith("trainer.strategy.") else ():
        if option in parameters(target):
            return f"strategy={strategy} {setting}"
    return known


def _short(node: dict[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def _fits(value: Any, parameter: Parameter) -> bool:
    if isinstance(value, dict) or parameter.kinds is None or parameter.literals is None:
        return True
    number = float in parameter.kinds and type(value) is int
    return number or type(value) in parameter.kinds or value in tuple(parameter.literals)  # a list is not hashable


def _misfit(value: Any, parameter: Parameter) -> str:
    literals = sorted({str(literal) for literal in parameter.literals or ()})
    expected = ", ".join([*literals, names(tuple(parameter.kinds or ()))]).strip(", ")
    hint = nearest(value, literals) if isinstance(value, str) else ""
    return f"found {names((type(value),))}, expected {expected}{hint and '.'}{hint}"


def names(kinds: tuple[type, ...]) -> str:
    """Return the names of types as a user writes them: null for None."""
    return " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in kinds))


def as_typed(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
