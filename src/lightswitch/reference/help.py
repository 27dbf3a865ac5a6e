"""What `--help` prints: choices and keys by what they are for, on one screen, and more of one group."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lightswitch.errors import RefusedRequest, nearest
from lightswitch.preflight.signatures import Parameter
from lightswitch.reference.choices import Choice, Key, config, groups

_PURPOSES = {
    "What is trained": "model data",
    "How it learns": "optimizer scheduler lr_scaling global_batch_size micro_batch_size seed on_nan",
    "What it runs on": "strategy precision compile cluster matmul_precision watch meet_timeout_seconds",
    "How far, from where": "trainer name run_id resume init_from init_names ckpt_path",
    "What it shows": "callbacks logger tags compare objective",
    "In place of a fit": "mode plan dry_run check device",
    "Whole recipes": "experiment debug",
}
_OTHER = "Besides"
_MORE = """\
GROUP=CHOICE, KEY=VALUE. Any argument of the model, the data, the Trainer or a callback can be given.

  python train.py --help strategy        the choices of a group, and the keys of its default
  python train.py --help strategy=fsdp   the keys of a choice; of a node, --help plan; one key, --help optimizer.lr
  python train.py strategy=ddp --cfg job the whole config
  python train.py --hydra-help           Hydra's own options"""


def text(about: str, script: Path, folder: Path) -> str:
    """Return the help on a group, a choice, or all of them.

    Args:
        about: a group, a choice, a node or a key, as `asks_for_help` returns it.
        script: whose docstring says what it does, and how it is called.
        folder: of the configs.

    Raises:
        RefusedRequest: there is none of that name.
    """
    found = groups(folder)
    if not about:
        return "\n".join((_docstring(script), "", *_overview(found, config(folder)), "", _MORE))
    group, _, name = about.partition("=")
    if group not in found:
        return "\n".join(_of_key(about, found, config(folder)))
    names = [choice.name for choice in found[group]]
    chosen = name or config(folder).defaults.get(group) or ""
    if name and name not in names:
        raise RefusedRequest([f"--help {about}: {group} has no {name}.{nearest(name, names)}"])
    listed = () if name else (*_aligned((f"{group}={one.name}", one.sentence) for one in found[group]), "")
    shown = [choice for choice in found[group] if choice.name == chosen]
    return "\n".join((*listed, *(line for choice in shown for line in _keys(choice))))


def _of_key(path: str, found: Mapping[str, list[Choice]], root: Choice) -> Iterator[str]:
    """Yield the lines of a key, or of all below a node, of the config and of the choices that it begins with."""
    chosen = [choice for group, name in root.defaults.items() for choice in found.get(group, ()) if choice.name == name]
    listed = [part for choice in chosen for part in found[choice.group] if part.name in choice.parts]
    keys = [key for choice in (root, *chosen, *listed) for key in choice.keys if not key.is_node]
    below = [key for key in keys if f"{key.path}.".startswith(f"{path}.") and not key.name.startswith("_")]
    if not below:
        named = [f"{group}={path}" for group, choices in found.items() for choice in choices if choice.name == path]
        known = {*found, *(key.path for key in keys), *(key.path.partition(".")[0] for key in keys)}
        hint = f" Did you mean {named[0]}?" if named else nearest(path, known, alike=0.65)
        raise RefusedRequest([f"--help {path}: there is no group and no key {path}.{hint}"])
    yield from _aligned(map(_told, below))


def _docstring(script: Path) -> str:
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.name


def _overview(found: Mapping[str, list[Choice]], root: Choice) -> Iterator[str]:
    """Yield the lines of all groups and keys at the config's root, by purpose."""
    keys = {key.path: key for key in root.keys if "." not in key.path}
    purposes = {purpose: names.split() for purpose, names in _PURPOSES.items()}
    placed = {name for names in purposes.values() for name in names}
    others = [name for name in (*found, *keys) if name not in placed]
    for purpose, names in (*purposes.items(), (_OTHER, others)):
        there = [name for name in names if name in found or name in keys]
        if there:
            yield f"{purpose}:"
            yield from _aligned((_offer(name, found, keys) for name in there), indent="  ")


def _offer(name: str, found: Mapping[str, list[Choice]], keys: Mapping[str, Key]) -> tuple[str, str]:
    if name == "trainer":
        return "trainer.", "devices, num_nodes, max_steps, max_epochs and every other argument of Lightning's Trainer"
    if name in found:
        return f"{name}=", " ".join(choice.name for choice in found[name])
    key = keys[name]
    return (f"{name}." if key.is_node else f"{name}={key.value}"), key.sentence


def _keys(choice: Choice) -> Iterator[str]:
    """Yield the keys of a choice: as the file sets them, then those that it leaves to the code."""
    keys = [key for key in choice.keys if not key.is_node and not key.name.startswith("_")]
    yield f"{choice.group}={choice.name}: {choice.sentence}"
    yield from _aligned((_told(key) for key in keys), indent="  ")


def _told(key: Key) -> tuple[str, str]:
    default = key.value if key.value is not None else _as_typed(key.parameter)
    told = "; ".join(part for part in (key.sentence, key.kind) if part)
    return f"{key.path}={' '.join(default.split())}", told


def _as_typed(parameter: Parameter | None) -> str:
    """Return the code's default as it is typed."""
    default = (parameter.default if parameter else None) or ""
    return {"None": "null", "True": "true", "False": "false"}.get(default, default.strip("'"))


def _aligned(rows: Iterable[tuple[str, str]], indent: str = "") -> Iterator[str]:
    """Yield pairs as two columns, the second wrapped within the terminal."""
    pairs = list(rows)
    width = min(34, max((len(first) for first, _ in pairs), default=0)) + 2
    room = max(40, shutil.get_terminal_size((120, 40)).columns - len(indent) - width)
    for first, second in pairs:
        lines = textwrap.wrap(second, room, break_long_words=False, break_on_hyphens=False) or [""]
        if len(first) + 2 > width:
            yield f"{indent}{first}"
        else:
            lines[0] = f"{first:<{width}}{lines[0]}".rstrip()
            yield f"{indent}{lines.pop(0)}"
        yield from (f"{indent}{' ' * width}{line}".rstrip() for line in lines if line)
