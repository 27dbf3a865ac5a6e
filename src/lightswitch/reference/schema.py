"""JSON schemas of a config folder, with which an editor completes keys, explains them and marks errors.

python -m lightswitch.reference.schema conf .vscode/schemas

It writes one file for each group, and one for config.yaml. A node whose _target_ is in a choice of the group accepts
only the arguments of the group's code; with any other _target_ it accepts anything, until the schemas are made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not

from lightswitch import regular_files
from lightswitch.errors import Command
from lightswitch.preflight.root_keys import ALLOWED, KINDS, WORDS
from lightswitch.preflight.targets import Parameter
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
}


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
        regular_files.write_json(asked.into / f"{name}.json", schema)


def schemas(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the schema of each group of a config folder by the group's name, and that of config.yaml as `config`."""
    found, whole = groups(folder), config(folder)
    trainer = [key for choice in found.get("trainer", ()) for key in choice.keys]
    root = _node(whole.keys, "", is_closed=True)
    root["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    root["properties"]["trainer"] = _node([*whole.keys, *trainer], "trainer")
    for group, choices in found.items():
        anything = {"type": ["object", "null"], "description": _offered(choices)}
        root["properties"].setdefault(group, anything)
    made = {}
    for group, choices in found.items():
        (package,) = {choice.package for choice in choices}
        keys = [key for choice in choices for key in choice.keys]
        own = root if not package else _node([*keys, *trainer] if package == "trainer" else keys, package)
        made[group.replace("/", "-")] = own | {"$schema": _DRAFT, "title": group, "description": _offered(choices)}
    return made | {"config": root | {"$schema": _DRAFT}}


def _offered(choices: Sequence[Choice]) -> str:
    return " ".join(f"{choice.name}: {choice.sentence}" for choice in choices)


def _node(keys: Sequence[Key], path: str, is_closed: bool = False) -> dict[str, Any]:
    """Return the schema of a node, from the keys of all files that have it.

    Args:
        is_closed: whether it accepts no other keys; so does a node of code that accepts no other arguments.
    """
    below: dict[str, list[Key]] = {}
    for key in keys:
        if key.path.rpartition(".")[0] == path:
            below.setdefault(key.name, []).append(key)
    targets = sorted({str(key.value) for key in below.get("_target_", ())})
    properties = {name: _value(same, keys, is_closed) for name, same in below.items()} | (_OF_HYDRA if targets else {})
    schema: dict[str, Any] = {"type": ["object", "null"], "properties": properties}
    if targets:
        properties["_target_"] = properties["_target_"] | {"examples": targets}
        closed = [target for target in targets if (code := signature_of(target)) and not code.open_ended]
        if closed:
            is_known: dict[str, Any] = {"properties": {"_target_": {"enum": closed}}}
            is_known |= {} if closed == targets else {"required": ["_target_"]}
            only = {"properties": dict.fromkeys(properties, True), "additionalProperties": False}
            schema |= {"if": is_known, "then": only}
    elif is_closed:
        schema["additionalProperties"] = False
    return schema


def _value(same: Sequence[Key], keys: Sequence[Key], is_closed: bool) -> dict[str, Any]:
    """Return the schema of a key: a node, values that an annotation or config.yaml allows, or an interpolation."""
    path, parameter = same[0].path, next((key.parameter for key in same if key.parameter), None)
    about = next((key.sentence for key in same if key.sentence), "")
    if any(key.is_node for key in same):
        node = _node(keys, path, is_closed)
        return node | {"type": [*node["type"], "string"]} | ({"description": about} if about else {})
    if parameter is not None and parameter.annotation:
        default = "" if parameter.default is None else f", {parameter.default} by default"
        about = f"{about} ({parameter.annotation}{default})".strip()
    if path in ALLOWED:
        return {"description": about, "enum": list(ALLOWED[path])}
    allowed = list(_allowed(path, parameter))
    return {"description": about} | ({"anyOf": [*allowed, _INTERPOLATION]} if allowed else {})


def _allowed(path: str, parameter: Parameter | None) -> Iterator[dict[str, Any]]:
    """Yield the schemas of values that a key may have; none if it may have any."""
    kinds: Collection[type] | None = KINDS.get(path)
    words = list[object](WORDS.get(path, ()))
    if parameter is not None:
        if parameter.kinds is None or parameter.literals is None:
            return
        kinds, words = parameter.kinds, [one for one in parameter.literals if isinstance(one, str | int)]
        yield {"type": "object"}  # a node that makes it
    if kinds:
        yield {"type": sorted(_TYPES[kind] for kind in kinds)}
    if words and (kinds or parameter is not None):
        yield {"enum": sorted(words, key=str)}


if __name__ == "__main__":
    main()
