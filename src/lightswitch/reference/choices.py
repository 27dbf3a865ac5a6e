"""The files of a config folder: what each is for, its keys, and what the code that it names takes besides."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not

from lightswitch.config.values import KINDS, KINDS_OF_OTHERS, WORDS
from lightswitch.preflight.signatures import Parameter, Signature, signature
from lightswitch.preflight.targets import names

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # fifteen times as fast, where PyYAML was built with it
_OF_HYDRA = ("defaults", "hydra")
_SECTION = re.compile(r"^( *)(?:Args|Arguments|Parameters):[ \t]*\n(.*?)(?=^\1\S|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^\*{0,2}(\w+(?:, \w+)*)(?: *\([^\n]*?\))? ?: *(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_LONGEST = 400  # characters of a sentence


@dataclass(frozen=True)
class Key:
    """A key of a config file, or an argument of the code that the file names.

    Attributes:
        path: from the config's root, as it is typed: `trainer.strategy.tensor_parallel_size`.
        value: as the file has it; None for an argument that the file leaves to the code.
        is_node: whether the file has other keys below it.
        sentence: the comment beside it, else what the code's docstring says of the argument, or nothing.
        parameter: that it is given to; None where no code is known to take it.
    """

    path: str
    value: str | None
    is_node: bool
    sentence: str
    parameter: Parameter | None

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def kind(self) -> str:
        """The types that it takes, as its code has them or as a user writes them; nothing where they are not known."""
        if self.parameter:
            return self.parameter.annotation
        kinds = names((KINDS | KINDS_OF_OTHERS).get(self.path, ()))
        return " or ".join([*WORDS.get(self.path, ()), kinds] if kinds else [])


@dataclass(frozen=True)
class Choice:
    """A file of a config folder.

    Attributes:
        group: the folder it lies in; empty for the config itself.
        path: of the file.
    """

    group: str
    path: Path

    @property
    def name(self) -> str:
        """The word that chooses it."""
        return self.path.stem

    @functools.cached_property
    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def sentence(self) -> str:
        """The comment at its head."""
        lines = re.match(r"(?:#.*\n)*", self._text)
        assert lines is not None
        return " ".join(line[1:].strip() for line in lines[0].splitlines() if not line.startswith("# @package"))

    @property
    def package(self) -> str:
        """The key that its content is put at; empty for the root."""
        found = re.match(r"# @package (\S+)", self._text)
        return self.group if found is None else found[1].replace("_global_", "")

    @property
    def defaults(self) -> dict[str, str | None]:
        """The choice of each group that its defaults list names; `true` and `false` as text."""
        listed = (yaml.load(self._text, _Loader) or {}).get("defaults", [])
        pairs = [pair for entry in listed if isinstance(entry, dict) for pair in entry.items()]
        return {str(group).removeprefix("override ").lstrip("/"): name and str(name) for group, name in pairs}

    @property
    def parts(self) -> tuple[str, ...]:
        """The other choices of its group that it is made of."""
        listed = (yaml.load(self._text, _Loader) or {}).get("defaults", [])
        return tuple(entry for entry in listed if isinstance(entry, str) and entry != "_self_")

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """The keys in the file's order, each node's followed by what its code takes besides."""
        root = yaml.compose(self._text, _Loader)
        return tuple(self._below(root, self.package)) if isinstance(root, yaml.MappingNode) else ()

    def _below(self, node: yaml.MappingNode, path: str) -> Iterator[Key]:
        given = {key.value: (key, value) for key, value in node.value if key.value not in _OF_HYDRA}
        code = signature_of(given["_target_"][1].value if "_target_" in given else None)
        takes, told = (code.parameters, sentences_of_arguments(code.docstrings)) if code else ({}, {})
        for name, (key, value) in given.items():
            below = f"{path}.{name}".lstrip(".")
            is_node = isinstance(value, yaml.MappingNode)
            sentence = self._comment(key, value) or told.get(name, "")
            yield Key(below, self._source(value), is_node, sentence, takes.get(name))
            if is_node:
                yield from self._below(value, below)
        yield from (
            Key(f"{path}.{name}", None, False, told.get(name, ""), takes[name]) for name in takes if name not in given
        )

    def _source(self, value: yaml.Node) -> str:
        return self._text[value.start_mark.index : value.end_mark.index].strip()

    def _comment(self, key: yaml.Node, value: yaml.Node) -> str:
        end = value.end_mark if isinstance(value, yaml.ScalarNode) else key.end_mark
        found = re.search(r"\s#\s*(.*)$", self._text[end.index :].partition("\n")[0])
        return found[1] if found else ""


def signature_of(target: str | None) -> Signature | None:
    """Return the parameters of code that a config names; None where there is no such code, or its source does not
    tell."""
    try:
        return signature(target) if target and "." in target else None
    except LookupError:
        return None


def groups(folder: Path) -> dict[str, list[Choice]]:
    """Return the choices of each group of a config folder, in the alphabet's order."""
    found: dict[str, list[Choice]] = {}
    for path in sorted(folder.glob("*/**/*.yaml")):
        group = path.parent.relative_to(folder).as_posix()
        if not group.startswith("hydra"):
            found.setdefault(group, []).append(Choice(group, path))
    return found


def config(folder: Path) -> Choice:
    """Return the config itself, which names the choice of each group."""
    return Choice("", folder / "config.yaml")


def sentences(folder: Path) -> dict[str, str]:
    """Return what each key of a config folder is, by its path, where some file or the code says it."""
    choices = (config(folder), *(choice for group in groups(folder).values() for choice in group))
    return {key.path: key.sentence for choice in reversed(choices) for key in choice.keys if key.sentence}


def sentences_of_arguments(docstrings: Iterable[str]) -> dict[str, str]:
    """Return the first sentence on each argument, by its name; of several docstrings, the first that has it."""
    found: dict[str, str] = {}
    for docstring in docstrings:
        for name, told in _entries(docstring):
            found.setdefault(name, told)
    return found


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    for _, section in _SECTION.findall(textwrap.dedent(docstring)):
        for listed, told in _ENTRY.findall(textwrap.dedent(section)):
            if sentence := _sentence(told):
                yield from ((name, sentence) for name in listed.split(", "))


def _sentence(told: str) -> str:
    """Return the first sentence of a paragraph without its markup, nor the default, which the signature has."""
    text = " ".join(told.split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"\1", text)
    text = re.sub(r"`([^`<]+?) *(?:<[^>]*>)?`_*", r"\1", text.replace("``", "`"))
    text = re.sub(r" *\((?:[Dd]efault|optional)[^)]*\)+| *[Dd]efaults?(?: to|:|=) .*$", "", text)
    first = re.split(r"(?<=[^.][a-z)\]'\"0-9])\.(?: |$)", text, maxsplit=1)[0].strip(" .,")
    return first if len(first) <= _LONGEST else ""
