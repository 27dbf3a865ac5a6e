"""The files of a config folder, with their keys and descriptions, and the text that `--help` prints about them."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not

from lightswitch.errors import RefusedRequest, nearest
from lightswitch.preflight.root_keys import KINDS, WORDS
from lightswitch.preflight.targets import Parameter, kinds_in_words, signature

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 15 times as fast, if PyYAML was built with it
_OF_HYDRA = ("defaults", "hydra")
_SECTION = re.compile(r"^( *)(?:Args|Arguments|Parameters):[ \t]*\n(.*?)(?=^\1\S|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^\*{0,2}(\w+(?:, \w+)*)(?: *\([^\n]*?\))? ?: *(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Key:
    """A key of a config file, or an argument of the code that the file names.

    Attributes:
        path: from the config's root, as it is typed: `trainer.strategy.tensor_parallel_size`.
        value: source text in the file; None for an argument that the file does not set.
        is_node: whether the file has other keys below it.
        sentence: the comment beside it, or the description of the argument in the code's docstring, or empty.
        parameter: the parameter of the code that it sets; None if there is none.
    """

    path: str
    value: str | None
    is_node: bool
    sentence: str
    parameter: Parameter | None

    @property
    def name(self) -> str:
        """The last component of its path."""
        return self.path.rpartition(".")[2]

    @property
    def default(self) -> str:
        """The default of the parameter, as a user types it; empty if there is none."""
        default = (self.parameter.default if self.parameter else None) or ""
        return {"None": "null", "True": "true", "False": "false"}.get(default, default.strip("'"))

    @property
    def kind(self) -> str:
        """Types that it accepts, as annotated in the code or as a user writes them; empty if they are unknown."""
        if self.parameter:
            return self.parameter.annotation
        kinds = kinds_in_words(KINDS.get(self.path, ()))
        return " or ".join([*WORDS.get(self.path, ()), kinds] if kinds else [])


@dataclass(frozen=True)
class Choice:
    """A file of a config folder.

    Attributes:
        group: the folder that contains it; empty for config.yaml.
        path: of the file.
    """

    group: str
    path: Path

    @property
    def name(self) -> str:
        """The name that selects it on the command line."""
        return self.path.stem

    @functools.cached_property
    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def sentence(self) -> str:
        """The comment at the top of the file."""
        lines = re.match(r"(?:#.*\n)*", self._text)
        assert lines is not None
        return " ".join(line[1:].strip() for line in lines[0].splitlines() if not line.startswith("# @package"))

    @property
    def package(self) -> str:
        """The config key that its content is merged into; empty for the root."""
        found = re.match(r"# @package (\S+)", self._text)
        return self.group if found is None else found[1].replace("_global_", "")

    @functools.cached_property
    def _defaults_list(self) -> list[Any]:
        return list((yaml.load(self._text, _Loader) or {}).get("defaults", []))

    @property
    def defaults(self) -> dict[str, str | None]:
        """The choice of each group in its defaults list; `true` and `false` as text."""
        pairs = [pair for entry in self._defaults_list if isinstance(entry, dict) for pair in entry.items()]
        return {str(group).removeprefix("override ").lstrip("/"): name and str(name) for group, name in pairs}

    @property
    def parts(self) -> list[str]:
        """The other choices of its group that its defaults list includes."""
        return [entry for entry in self._defaults_list if isinstance(entry, str)]

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """The keys in the order of the file; after the keys of each node, the arguments of its code that are not
        set."""
        root = yaml.compose(self._text, _Loader)
        return tuple(self._below(root, self.package)) if isinstance(root, yaml.MappingNode) else ()

    def _below(self, node: yaml.MappingNode, path: str) -> Iterator[Key]:
        given = {key.value: (key, value) for key, value in node.value if key.value not in _OF_HYDRA}
        target, code = given["_target_"][1].value if "_target_" in given else "", None
        with contextlib.suppress(LookupError):  # there is no such code, or its source does not show its arguments
            code = signature(target) if "." in target else None
        takes, sentences = (code.parameters, sentences_of_arguments(code.docstrings)) if code else ({}, {})
        for name, (key, value) in given.items():
            below = f"{path}.{name}".lstrip(".")
            is_node = isinstance(value, yaml.MappingNode)
            sentence = self._comment(key, value) or sentences.get(name, "")
            source = self._text[value.start_mark.index : value.end_mark.index].strip()
            yield Key(below, source, is_node, sentence, takes.get(name))
            if is_node:
                yield from self._below(value, below)
        for name in takes:
            if name not in given and (name in sentences or (code and name not in code.passed_on)):
                yield Key(f"{path}.{name}", None, False, sentences.get(name, ""), takes[name])

    def _comment(self, key: yaml.Node, value: yaml.Node) -> str:
        end = value.end_mark if isinstance(value, yaml.ScalarNode) else key.end_mark
        found = re.search(r"\s#\s*(.*)$", self._text[end.index :].partition("\n")[0])
        return found[1] if found else ""


def groups(folder: Path) -> dict[str, list[Choice]]:
    """Return the choices of each group of a config folder, in alphabetical order."""
    found: dict[str, list[Choice]] = {}
    for path in sorted(folder.glob("*/**/*.yaml")):
        group = path.parent.relative_to(folder).as_posix()
        if not group.startswith("hydra"):
            found.setdefault(group, []).append(Choice(group, path))
    return found


def config(folder: Path) -> Choice:
    """Return config.yaml, which names the default choice of each group."""
    return Choice("", folder / "config.yaml")


def sentences_of_arguments(docstrings: Iterable[str]) -> dict[str, str]:
    """Return the first sentence about each argument, by name, from the first docstring that describes it."""
    found: dict[str, str] = {}
    for docstring in docstrings:
        for _, section in _SECTION.findall(textwrap.dedent(docstring)):
            for listed, entry in _ENTRY.findall(textwrap.dedent(section)):
                if sentence := _sentence(entry):
                    found |= {name: sentence for name in listed.split(", ") if name not in found}
    return found


def _sentence(told: str) -> str:
    """Return the first sentence of a paragraph, without markup and without the default, which the signature has."""
    text = " ".join(told.split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"\1", text)
    text = re.sub(r"`([^`<]+?) *(?:<[^>]*>)?`_*", r"\1", text.replace("``", "`"))
    text = re.sub(r" *\((?:[Dd]efault|optional)[^)]*\)+| *[Dd]efaults?(?: to|:|=) .*$", "", text)
    return re.split(r"(?<=[^.][a-z)\]'\"0-9])\.(?: |$)", text, maxsplit=1)[0].strip(" .,")


_PURPOSES = {
    "What is trained": "model data",
    "How it learns": "optimizer scheduler lr_scaling global_batch_size micro_batch_size seed on_nan",
    "What it runs on": "strategy precision num_nodes compile cluster matmul_precision watch meet_timeout_seconds",
    "Duration and starting point": "trainer name run_id resume init_from init_names ckpt_path",
    "What it shows": "callbacks logger tags objective",
    "Instead of a fit": "mode plan dry_run check device sweep",
    "Complete recipes": "experiment debug",
}
_OTHER = "Other"
_MORE = """\
GROUP=CHOICE, KEY=VALUE. Any argument of the model, the data, the Trainer or a callback can be given.

  python train.py --help strategy        the choices of a group, and the keys of its default
  python train.py --help strategy=fsdp   the keys of a choice; of a node, --help plan; one key, --help optimizer.lr
  python train.py strategy=ddp --cfg job the whole config
  python train.py --hydra-help           Hydra's own options"""


def help_text(about: str, script: Path, folder: Path) -> str:
    """Return the help on a group, a choice, a node or a key, or the overview.

    Args:
        about: a group, a choice, a node or a key, as `asks_for_help` returns it; empty for the overview.
        script: the main script, whose docstring begins the overview.
        folder: the config folder.

    Raises:
        RefusedRequest: nothing has that name.
    """
    found = groups(folder)
    if not about:
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.name
        return "\n".join((docstring, "", *_overview(found, config(folder)), "", _MORE))
    group, _, name = about.partition("=")
    if group not in found:
        return "\n".join(_of_key(about, found, config(folder)))
    names = [choice.name for choice in found[group]]
    chosen = name or config(folder).defaults.get(group) or ""
    if name and name not in names:
        raise RefusedRequest([f"--help {about}: {group} has no {name}.{nearest(name, names)}"])
    lines = [] if name else [*_aligned((f"{group}={one.name}", one.sentence) for one in found[group]), ""]
    for choice in (one for one in found[group] if one.name == chosen):
        keys = [key for key in choice.keys if not key.is_node and not key.name.startswith("_")]
        lines += [f"{group}={chosen}: {choice.sentence}", *_aligned(map(_told, keys), indent="  ")]
    return "\n".join(lines)


def _of_key(path: str, found: Mapping[str, list[Choice]], root: Choice) -> Iterator[str]:
    """Yield the help lines of a key, or of all keys below a node, in the config and its default choices."""
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


def _overview(found: Mapping[str, list[Choice]], root: Choice) -> Iterator[str]:
    """Yield the help lines of all groups and of the keys at the config's root, by purpose."""
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


def _told(key: Key) -> tuple[str, str]:
    value = key.value if key.value is not None else key.default
    return f"{key.path}={' '.join(value.split())}", "; ".join(part for part in (key.sentence, key.kind) if part)


def _aligned(rows: Iterable[tuple[str, str]], indent: str = "") -> Iterator[str]:
    """Yield pairs as two columns, the second wrapped within the terminal."""
    pairs = list(rows)
    width = min(34, max((len(first) for first, _ in pairs), default=0)) + 2
    columns = max(len(indent) + width + 40, shutil.get_terminal_size((120, 40)).columns)
    for first, second in pairs:
        first = f"{indent}{first:<{width}}" if len(first) + 2 <= width else f"{indent}{first}  "
        rest = " " * (len(indent) + width)
        yield from textwrap.wrap(second or " ", columns, initial_indent=first, subsequent_indent=rest) or [
            first.rstrip()
        ]
