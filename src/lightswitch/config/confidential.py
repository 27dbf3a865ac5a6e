"""Secrets in what a run writes: values of the environment stay `${oc.env:NAME}`, those named like secrets are ***."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lightswitch.config.hydra_versions import register_resolver

_MASK = "***"
_ENVIRONMENT = "${oc.env:"

# Names of secrets, after `_spelled`. Substrings where no other word contains them; else whole words: `max_tokens`,
# `author`, `sort_key`, `token_mixer` and a tokenizer's `eos_token` are no secrets.
_SECRET = re.compile(
    r"passw|passphrase|pwd|secret|credential|"
    r"(access|account|admin|aes|api|app|auth|client|crypt|deploy|encryption|gpg|hmac|license|master|private|rsa|service|"
    r"session|shared|signing|ssh|ssl|storage|subscription|tls)_?keys?$"
)
_OF_TOKENIZERS = re.compile(r"(?<![a-z])(bos|cls|eos|end|image|mask|pad|sep|special|start|stop|unk)_token")
_SECRET_TEXT = re.compile(r"token$|(access|api)_?tokens|auth(?!or(?!i[sz]))|bearer|cookie|jwt|private")
_LOGIN = re.compile(r"://[^/\s]*@")  # in a URL
_SWITCH = re.compile(r"true|false|null|none", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d_.]+(e[-+]?\d+)?", re.IGNORECASE)


def public(cfg: DictConfig) -> dict[str, Any]:
    """Return a config as a run writes it: resolved, except for values of the environment, and `masked`."""
    raw: Any = OmegaConf.to_container(cfg)
    register_resolver("oc.env", _interpolation)
    try:
        return {key: masked(_as_written(raw[key], _resolved(cfg, raw, key)), key) for key in raw}
    finally:
        register_resolver("oc.env", oc.env)


def _interpolation(*words: object) -> str:
    return f"{_ENVIRONMENT}{','.join('null' if word is None else str(word) for word in words)}}}"


def _resolved(cfg: DictConfig, raw: dict[str, Any], key: str) -> Any:
    try:
        value = cfg[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:  # computed from a value of the environment
        return raw[key]


def _as_written(raw: Any, resolved: Any) -> Any:
    """Return a resolved node in which values that name the environment themselves are as the config has them."""
    if isinstance(raw, dict) and isinstance(resolved, dict):
        return {key: _as_written(raw[key], value) for key, value in resolved.items()}
    if isinstance(raw, list) and isinstance(resolved, list):
        return [_as_written(*pair) for pair in zip(raw, resolved, strict=True)]
    return raw if isinstance(raw, str) and is_of_environment(raw) else resolved


def is_of_environment(value: object) -> bool:
    """Return whether a value, not resolved, takes something from the environment."""
    return _ENVIRONMENT in str(value).replace("\\", "")  # Hydra escapes the overrides of a sweep's jobs


def masked(node: Any, key: str = "") -> Any:
    """Return a value, and those in it, with *** for what its key calls a secret, unless it is of the environment."""
    if type(node) is dict:
        return {name: masked(child, str(name)) for name, child in node.items()}
    if type(node) is list:
        return [masked(child, key) for child in node]
    return _MASK if _is_secret(key, node) and not is_of_environment(node) else node


def masked_override(override: str) -> str:
    """Return an override with *** for a value whose key calls it a secret, or that has one under a key of its own."""
    key, equals, value = override.partition("=")
    inner = re.findall(r"([\w-]+)['\"]?\s*:\s*([^,{}\[\]]*)", value)  # of a dict, such as {api_key: abc}
    named = [(key.rpartition(".")[2], value), *inner]
    is_secret = any(_is_secret(name, _typed(text.strip())) and not is_of_environment(text) for name, text in named)
    return f"{key}={_MASK}" if equals and is_secret else override


def _typed(text: str) -> object:
    return None if _SWITCH.fullmatch(text) else 0 if _NUMBER.fullmatch(text) else text


def masked_keys(node: Any) -> list[str]:
    """Return the dotted keys in a config that a run has written whose values it has masked."""
    return [key for key, leaf in _flat(node) if leaf == _MASK]


def values(cfg: DictConfig, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the values of a config as a run writes them, as text by dotted key: none of the environment, no secret,
    and none of the clock, which each process reads for itself.

    Args:
        without: prefixes of keys to leave out.
    """
    by_clock = {key for key, leaf in _flat(OmegaConf.to_container(cfg)) if "${now:" in str(leaf)}
    flat = {key: str(leaf) for key, leaf in _flat(public(cfg)) if key not in by_clock}
    return {key: text for key, text in flat.items() if not key.startswith(without)}


def _is_secret(name: str, value: object) -> bool:
    """Return whether the last part of a key calls its value a secret, or whether it is a URL with a user.

    A switch and null are none. Under a name like `token` or `auth`, a number is none either: it is a setting, as in
    `use_auth=1`. Under a name like `password` it is one.
    """
    if value is None or isinstance(value, bool):
        return False
    name = _spelled(name)
    is_text = _SECRET_TEXT.search(name) and not _OF_TOKENIZERS.search(name) and not isinstance(value, int | float)
    return bool(_SECRET.search(name) or is_text or (isinstance(value, str) and _LOGIN.search(value)))


def _spelled(name: str) -> str:
    """Return a name in lower case, with its words separated by underscores: api_key for apiKey and API-KEY."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("-", "_")).lower()


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from _flat(child, f"{path}.{name}")
    else:
        yield path.removeprefix("."), node
