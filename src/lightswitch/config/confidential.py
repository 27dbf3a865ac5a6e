"""Confidential values: those that a config takes from the environment are not written to files or messages."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lightswitch.cluster.sealed import Values
from lightswitch.config.hydra_versions import register_resolver

Path = tuple[str | int, ...]  # keys from the config's root to a value

# Names of secrets, after `_spelled`. Substrings where no other word contains them; else whole words: `max_tokens`,
# `author` and `sort_key` are no secrets.
_SECRET = re.compile(
    r"passw|passphrase|pwd|secret|credential|"
    r"(access|account|admin|aes|api|app|auth|client|crypt|deploy|encryption|gpg|hmac|license|master|private|rsa|service|"
    r"session|shared|signing|ssh|ssl|storage|subscription|tls)_?keys?(?![a-z])"
)
_SECRET_TEXT = re.compile(r"token(?![a-z])|(access|api)_?tokens|auth(?!or(?!i[sz]))|bearer|cookie|jwt|private")
_KEY = re.compile(r"(?<![a-z])keys?(?![a-z])")  # of a service, or of a dict
_LIKE_A_KEY = re.compile(r"""['"]?(?=\S*\d)[\w+/=.-]{16,}['"]?""")  # the value of a service's key
_LOGIN = re.compile(r"://[^/\s]*@")  # in a URL
_SWITCH = re.compile(r"true|false|null|none", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d_.]+(e[-+]?\d+)?", re.IGNORECASE)
_FROM_ENVIRONMENT = re.compile(r"""['"]?\$\{oc\.env:[^{}]*\}['"]?""")
_REFERENCE = re.compile(r"\$\{[^:{}]+\}")  # reference to another config value
_LEAST_DIGITS = 4  # characters of a number that is replaced under any key
_LEAST_LENGTH = 8  # characters of a value to replace within other text: a shorter one may match by chance


@dataclass(frozen=True)
class FromEnvironment:
    """Config value that an interpolation takes from the environment.

    Args:
        interpolation: text of the interpolation, such as `${oc.env:NAME}`.
        parts: values of its environment variables by name.
    """

    value: Any
    interpolation: str
    parts: Mapping[str, str]


class _Asked(NamedTuple):
    """Call of the resolver ``oc.env``."""

    interpolation: str  # text of the config node that contains the call
    name: str


def from_environment(cfg: DictConfig) -> dict[Path, FromEnvironment]:
    """Return the values that call ``oc.env`` when they are resolved, directly or through other values."""
    if "oc.env" not in str(OmegaConf.to_container(cfg, resolve=False)):
        return {}
    asked: list[_Asked] = []

    def env(*arguments: Any, _node_: Any) -> str | None:
        asked.append(_Asked(str(_node_._value()), str(arguments[0])))
        return oc.env(*arguments)

    register_resolver("oc.env", env)
    try:
        return dict(_looked_up(cfg, (), asked))
    finally:
        register_resolver("oc.env", oc.env)


def _looked_up(
    node: DictConfig | ListConfig, path: Path, asked: list[_Asked]
) -> Iterator[tuple[Path, FromEnvironment]]:
    keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    raw: Any = OmegaConf.to_container(node, resolve=False)
    for key in keys:
        asked.clear()
        value = None
        with contextlib.suppress(OmegaConfBaseException):  # missing values are reported elsewhere
            value = node[key]
        if asked:
            written = asked[0].interpolation if _REFERENCE.fullmatch(str(raw[key])) else str(raw[key])
            parts = {one.name: os.environ[one.name] for one in asked if one.name in os.environ}
            yield (*path, key), FromEnvironment(value, written, parts)
        elif isinstance(value, DictConfig | ListConfig):
            yield from _looked_up(value, (*path, key), asked)


def redacted(cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` resolved, except for interpolations of values from the environment."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    for (*path, last), found in from_environment(cfg).items():
        node = plain
        for key in path:
            node = node[key]
        node[last] = found.interpolation
    unresolved: DictConfig = OmegaConf.create(plain)
    return unresolved


def public(cfg: DictConfig) -> dict[str, Any]:
    """Return `redacted` ``cfg`` as plain containers, with *** for values that look like secrets."""

    def masked(node: Any, key: str) -> Any:
        if isinstance(node, dict):
            return {name: masked(child, str(name)) for name, child in node.items()}
        if isinstance(node, list):
            return [masked(child, key) for child in node]
        return "***" if _is_secret(key, repr(node)) else node

    plain: dict[str, Any] = masked(OmegaConf.to_container(redacted(cfg), resolve=False), "")
    return plain


def values(cfg: DictConfig, without: tuple[str, ...] = ()) -> Values:
    """Return all values of a config as text, by dotted key, and the keys of values to hide.

    Args:
        without: prefixes of keys to leave out.
    """
    flat = {key: leaf for key, leaf in _flat(OmegaConf.to_container(cfg, resolve=True)) if not key.startswith(without)}
    outside = [".".join(map(str, path)) for path in from_environment(cfg)]
    hidden = {key for key, leaf in flat.items() if _is_secret(key.rpartition(".")[2], repr(leaf))}
    hidden |= {
        key for key in flat for other in outside if f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.")
    }
    times = of_the_clock(cfg)
    texts = {key: f"{leaf} of {times[key]}" if key in times else str(leaf) for key, leaf in flat.items()}
    return Values(texts, frozenset(hidden))


def of_the_clock(cfg: DictConfig) -> dict[str, str]:
    """Return the values that a config takes from the clock, unresolved, by dotted key: each process has another."""
    flat = _flat(OmegaConf.to_container(cfg, resolve=False))
    return {key: leaf for key, leaf in flat if isinstance(leaf, str) and "${now:" in leaf}


def without_secret(override: str) -> str:
    """Return an override with *** for a value that looks like a secret, or contains one under a key of its own."""
    key, equals, value = override.partition("=")
    inner = re.findall(r"([\w-]+)['\"]?\s*:\s*([^,{}\[\]]*)", value)  # of a dict, such as {api_key: abc}
    is_secret = any(_is_secret(name, text.strip()) for name, text in [(key.rpartition(".")[2], value), *inner])
    return f"{key}=***" if equals and is_secret else override


def _is_secret(name: str, value: str) -> bool:
    """Return whether a value looks like a secret: by its name, as a URL with a user, or as a long key.

    A switch, null, and an interpolation from the environment are none. Under a name like `token` or `auth`, a number is
    none either: it is a setting, as in `eos_token=2`. Under a name like `password` it is one.

    Args:
        name: last part of the key.
        value: as it is written in an override, or as its repr; a string's repr has quotes, so that it is no number.
    """
    if _SWITCH.fullmatch(value) or _FROM_ENVIRONMENT.fullmatch(value):
        return False
    name = _spelled(name)
    return bool(
        _SECRET.search(name)
        or (_SECRET_TEXT.search(name) and not _NUMBER.fullmatch(value))
        or (_KEY.search(name) and _LIKE_A_KEY.fullmatch(value))
        or _LOGIN.search(value)
    )


def _spelled(name: str) -> str:
    """Return a name in lower case, with its words separated by underscores: api_key for apiKey and API-KEY."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("-", "_")).lower()


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from _flat(child, f"{path}.{name}")
    else:
        yield path.removeprefix("."), node


@dataclass(frozen=True)
class Cleaner:
    """Replacement of values from the environment, and of the variables they contain, by interpolations.

    Args:
        texts: pairs of a value, in each form in which an error may show it, and its interpolation; longest first, as
            one value may contain another.
        others: values that are not strings, such as numbers and lists, each with its key and its interpolation.
    """

    texts: tuple[tuple[str, str], ...]
    others: tuple[tuple[str, Any, str], ...] = ()

    @classmethod
    def of(cls, cfg: DictConfig) -> Cleaner:
        """Create a cleaner for all values that a config takes from the environment, except existing paths."""
        found = from_environment(cfg)
        outside = found.values()
        others = ((_key(path), _plain(one.value), one.interpolation) for path, one in found.items())
        whole = {one.value: one.interpolation for one in outside if isinstance(one.value, str)}
        parts = {value: f"${{oc.env:{name}}}" for one in outside for name, value in one.parts.items()}
        whole, parts = (
            {value: written for value, written in pairs.items() if value and not _is_path(value)}
            for pairs in (whole, parts)
        )
        shown = {
            form: written
            for value, written in [*parts.items(), *whole.items()]
            for form in _forms(value, written)
            if len(form) >= _LEAST_LENGTH
        }
        keyed = {  # KEY=VALUE in messages, which even a short value does not match by chance
            f"{'.'.join(map(str, path))}={form}": f"{'.'.join(map(str, path))}={one.interpolation}"
            for path, one in found.items()
            for form in (str(one.value), repr(one.value))
        }
        return cls(
            tuple(sorted((shown | whole | keyed).items(), key=lambda pair: -len(pair[0]))),
            tuple(other for other in others if other[1] is not None and not isinstance(other[1], str)),
        )

    def cleaned(self, value: Any, key: str = "") -> Any:
        """Return a string, a number, or dicts, lists and tuples of these, with confidential values replaced.

        Args:
            key: key of the value. A short number is replaced only under the confidential value's key.
        """
        if isinstance(value, str):
            return self._text(value)
        for own, secret, written in self.others:
            is_rare = not isinstance(value, bool) and len(str(value)) >= _LEAST_DIGITS
            if type(secret) is type(value) and secret == value and (is_rare or own == key):
                return written
        if isinstance(value, dict):
            cleaned = copy.copy(value)  # of its own type, such as a defaultdict
            cleaned.update({name: self.cleaned(item, str(name)) for name, item in value.items()})
            return cleaned
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self.cleaned(item, key) for item in value)
        return value

    def _text(self, text: str) -> str:
        for value, written in self.texts:
            if text == value:
                return written
            if len(value) >= _LEAST_LENGTH or "=" in value:
                text = text.replace(value, written)
        return text


def _key(path: Path) -> str:
    """Return the last key of a path, ignoring list indices after it."""
    return next((part for part in reversed(path) if isinstance(part, str)), "")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _forms(value: str, written: str) -> Iterator[str]:
    """Yield a value unchanged, and in the forms that errors may show: repr, JSON, URL-quoted, in one line, by line.

    Lines that the interpolation's text contains too are left out: they come from the config itself.
    """
    lines = (line.strip() for line in value.splitlines())
    for text in (value, *(line for line in lines if line not in written)):
        yield from (text, json.dumps(text)[1:-1], " ".join(text.split()))
        in_repr = repr(text)[1:-1]
        yield from (in_repr, in_repr.replace("'", r"\'"))  # escaped if the text around it has double quotes
        with contextlib.suppress(UnicodeEncodeError):  # bytes that are not text
            yield from (quote(text), quote(text, safe=""), quote_plus(text))


def _is_path(text: str) -> bool:
    """Return whether a text is an existing absolute path: it is not secret, and tracebacks need it."""
    return os.path.isabs(text) and os.path.exists(text)
