"""JSON schemas of a config folder, with which an editor completes the keys of its files and explains them.

python -m lightswitch.reference.schema conf .vscode/schemas

It writes one file for each group, and one for config.yaml. They mark no mistakes: the start of a run does, in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not

from lightswitch import regular_files
from lightswitch.errors import Command
from lightswitch.preflight.root_keys import ALLOWED, WORDS
from lightswitch.reference.choices import Choice, Key, config, groups

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that the YAML language server supports fully


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
    root = _node(whole.keys, "")
    root["properties"]["trainer"] = _node([*whole.keys, *trainer], "trainer")
    for group, choices in found.items():
        root["properties"].setdefault(group, {"description": _offered(choices)})
    made = {}
    for group, choices in found.items():
        (package,) = {choice.package for choice in choices}
        keys = [key for choice in choices for key in choice.keys]
        own = root if not package else _node([*keys, *trainer] if package == "trainer" else keys, package)
        made[group.replace("/", "-")] = own | {"$schema": _DRAFT, "title": group, "description": _offered(choices)}
    return made | {"config": root | {"$schema": _DRAFT}}


def _offered(choices: Sequence[Choice]) -> str:
    return " ".join(f"{choice.name}: {choice.sentence}" for choice in choices)


def _node(keys: Sequence[Key], path: str) -> dict[str, Any]:
    """Return the schema of a node, from the keys of all files that have it."""
    below: dict[str, list[Key]] = {}
    for key in keys:
        if key.path.rpartition(".")[0] == path:
            below.setdefault(key.name, []).append(key)
    properties = {name: _value(same, keys) for name, same in below.items()}
    if targets := sorted({str(key.value) for key in below.get("_target_", ())}):
        properties["_target_"]["examples"] = targets
    return {"properties": properties}


def _value(same: Sequence[Key], keys: Sequence[Key]) -> dict[str, Any]:
    """Return the schema of a key: a node, or words that an annotation or config.yaml allows."""
    path, parameter = same[0].path, next((key.parameter for key in same if key.parameter), None)
    about = next((key.sentence for key in same if key.sentence), "")
    if any(key.is_node for key in same):
        return _node(keys, path) | {"description": about}
    words: set[object] = {*ALLOWED.get(path, WORDS.get(path, ()))}
    if parameter is not None and parameter.annotation:
        default = "" if parameter.default is None else f", {parameter.default} by default"
        about = f"{about} ({parameter.annotation}{default})".strip()
        words |= {one for one in parameter.literals or () if isinstance(one, str | int)}
        words |= {True, False} if bool in (parameter.kinds or ()) else set()
    return {"description": about} | ({"examples": sorted(words, key=str)} if words else {})


if __name__ == "__main__":
    main()
