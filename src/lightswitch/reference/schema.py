"""JSON schemas of a config folder, with which an editor completes keys, explains them and marks errors.

python -m lightswitch.reference.schema conf .vscode/schemas

It writes one file for each group, and one for config.yaml. A node whose _target_ is in a choice of the group accepts
only the arguments of that code; with any other _target_ it accepts anything, until the schemas are made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not

from lightswitch.errors import Command
from lightswitch.preflight.root_keys import ALLOWED, KINDS, WORDS
from lightswitch.preflight.targets import Parameter, Signature
from lightswitch.reference import choices
from lightswitch.reference.choices import Choice, Key, config, groups, signature_of

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that the YAML language server supports fully
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
_TYPES[type(None)] = "null"
_INTERPOLATION: dict[str, Any] = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
_OF_HYDRA: dict[str, dict[str, Any]] = {
    "_target_": {"type": "string", "description": "the class or function that is called"},
    "_partial_": {"type": "boolean", "description": "pass the function itself, to be called later with more arguments"},
    "_convert_": {"enum": ["none", "partial", "object", "all"]},
    "_recursive_": {"type": "boolean"},
    "_args_": {"type": "array"},
    "defaults": {"type": "array"},
    "hydra": {"type": "object"},
}
_SEVERAL = ("callbacks", "logger")  # groups whose files contain nodes by name


def main() -> None:
    """Write the schemas of a config folder into another folder."""
    parser = Command("lightswitch.reference.schema", __doc__)
    parser.add_argument("conf", type=Path, metavar="CONF", help="the config folder")
    parser.add_argument("into", type=Path, metavar="INTO", help="the folder of the schemas, one for each group")
    asked = parser.parse_args()
    if not (asked.conf / "config.yaml").is_file():
        parser.error(f"{asked.conf} has no config.yaml; name the folder that contains it")
    asked.into.mkdir(parents=True, exist_ok=True)
    try:
        made = schemas(asked.conf)
    except yaml.YAMLError as error:
        parser.error(" ".join(str(error).split()))
    for name, schema in made.items():
        (asked.into / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n")


def schemas(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the schema of each group of a config folder by the group's name, and that of config.yaml as `config`."""
    found = groups(folder)
    root = _root(config(folder), found)
    made = {group: _of_group(group, choices, root) for group, choices in found.items()}
    return {group.replace("/", "-"): schema for group, schema in made.items()} | {"config": root}


def _root(choice: Choice, found: Mapping[str, list[Choice]]) -> dict[str, Any]:
    """Return the schema of config.yaml: its keys, and a node for each group."""
    nodes: dict[str, dict[str, Any]] = {
        group: {"type": ["object", "null"], "description": _offered(found[group])} for group in found
    }
    nodes.setdefault("trainer", {}).update(_arguments(_signatures(found.get("trainer", ()))))
    return {"$schema": _DRAFT, **_object([*_nested(choice.keys, "")], nodes, is_whole=True)}


def _signatures(choices: Iterable[Choice]) -> list[Signature]:
    """Return the signatures of the files' top-level _target_, not of nodes inside them."""
    targets = {key.value for choice in choices for key in choice.keys if key.path == f"{choice.group}._target_"}
    return [found for target in targets if (found := signature_of(target))]


def _offered(choices: Iterable[Choice]) -> str:
    return " ".join(f"{choice.name}: {choice.sentence}" for choice in choices)


def _of_group(group: str, choices: list[Choice], root: dict[str, Any]) -> dict[str, Any]:
    title: dict[str, Any] = {"$schema": _DRAFT, "title": group, "description": _offered(choices)}
    packages = {choice.package for choice in choices}
    if packages == {""}:
        return root | title
    node = _node(choices)
    if group in _SEVERAL:
        defaults = {"defaults": _OF_HYDRA["defaults"]}
        return title | {"type": "object", "properties": defaults, "additionalProperties": node}
    if packages == {"trainer"} != {group}:  # files that set keys of the Trainer, such as strategy and precision
        trainer: dict[str, Any] = root["properties"]["trainer"]
        strategy = node | {"type": ["object", "string"]}
        return title | trainer | {"type": "object", "properties": {**trainer["properties"], "strategy": strategy}}
    return title | node


def _node(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the schema of a node that names code; for code that the choices name, it accepts only its arguments."""
    targets: dict[str, list[Key]] = {}
    for choice in choices:
        for key in choice.keys:
            if key.name == "_target_" and key.value:
                targets.setdefault(key.value, []).extend(_beside(key, choice.keys))
    cases = [case for target, keys in targets.items() for case in _case(target, keys)]
    return {
        "type": "object",
        "properties": {"_target_": _OF_HYDRA["_target_"] | {"examples": sorted(targets)}},
        **({"allOf": cases} if cases else {}),
    }


def _beside(target: Key, keys: Iterable[Key]) -> list[Key]:
    """Return the keys of the node that contains `target`."""
    node = target.path.rpartition(".")[0]
    return [key for key in keys if key.path.rpartition(".")[0] == node]


def _case(target: str, keys: list[Key]) -> Iterator[dict[str, Any]]:
    if found := signature_of(target):
        sentences = {key.name: key.sentence for key in keys if key.sentence}
        is_this = {"properties": {"_target_": {"const": target}}, "required": ["_target_"]}
        yield {"if": is_this, "then": _arguments([found], sentences)}


def _arguments(signatures: Iterable[Signature], sentences: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the schema of the arguments that any of the signatures accepts."""
    known = list(signatures)
    described = {name: text for one in known for name, text in choices.sentences_of_arguments(one.docstrings).items()}
    described |= sentences or {}
    properties = {name: _value(one, described.get(name, "")) for s in known for name, one in s.parameters.items()}
    return {
        "properties": {**_OF_HYDRA, **properties},
        "additionalProperties": not known or any(one.open_ended for one in known),
    }


def _value(parameter: Parameter, sentence: str = "") -> dict[str, Any]:
    """Return the schema of an argument: values that its annotation allows, an interpolation, or a nested node."""
    default = "" if parameter.default is None else f", {parameter.default} by default"
    schema = {
        "description": f"{sentence} ({parameter.annotation}{default})".strip() if parameter.annotation else sentence
    }
    if parameter.kinds is None or parameter.literals is None:
        return schema
    types = sorted({_TYPES[kind] for kind in parameter.kinds})
    allowed: list[dict[str, Any]] = [{"type": types}] if types else []
    literals = sorted((literal for literal in parameter.literals if isinstance(literal, str | int)), key=str)
    return schema | {
        "anyOf": [*allowed, *([{"enum": literals}] if literals else []), _INTERPOLATION, {"type": "object"}]
    }


def _nested(keys: Iterable[Key], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the schema of each key directly below a path of config.yaml."""
    listed = list(keys)
    for key in listed:
        if key.path.rpartition(".")[0] == path:
            inner = list(_nested(listed, key.path))
            own: dict[str, Any] = {"description": key.sentence} if key.sentence else {}
            own |= _allowed(key.path)
            yield key.name, own | (_object(inner, {}, is_whole=False) if inner else {})


def _allowed(path: str) -> dict[str, Any]:
    """Return the schema of a key's value in config.yaml: fixed words, or its types; empty if anything is valid."""
    if path in ALLOWED:
        return {"enum": list(ALLOWED[path])}
    kinds = KINDS.get(path)
    if not kinds:
        return {}
    words = [{"enum": list(WORDS[path])}] if path in WORDS else []
    return {"anyOf": [{"type": sorted(_TYPES[kind] for kind in kinds)}, *words, _INTERPOLATION]}


def _object(
    properties: Iterable[tuple[str, dict[str, Any]]], nodes: Mapping[str, dict[str, Any]], is_whole: bool
) -> dict[str, Any]:
    ours = {"defaults": _OF_HYDRA["defaults"], "hydra": _OF_HYDRA["hydra"]} if is_whole else {}
    merged = {**ours, **nodes}
    for name, schema in properties:
        merged[name] = merged.get(name, {}) | schema
    return {"type": "object", "properties": merged, "additionalProperties": False}


if __name__ == "__main__":
    main()
