"""One-line messages for Hydra's errors: what was found, what was expected, and what to type instead."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
)
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]  # PyYAML has no types of its own

from lightswitch.config import aliases
from lightswitch.config.overrides import CONSTRUCTED, GROUPS, MODES, key_and_value, raw_keys
from lightswitch.errors import Refused, RefusedRequest, listed, nearest

_KEY = re.compile(r"[+~]*[^\W\d][\w@/-]*(\.[\w@/-]+)*( *=|$)")
_SHOWN = 80  # characters to show of a long setting
NO_YAML = (YAMLError, UnicodeDecodeError)  # errors of reading a config file that is not valid YAML

_SETS = ("callbacks", "logger")  # groups of which a run can have several choices
_OF_EXTRAS = {"hydra/sweeper/optuna": "optuna"}  # Hydra plugins, and the extra that installs each


def check_flags(arguments: list[str], typed: list[str]) -> None:
    """Check the command line's words, to report problems without Hydra's usage text or traceback.

    Args:
        arguments: the words as `normalised` returns them.
        typed: the words in the order in which they were typed.

    Raises:
        RefusedRequest: a flag does not exist, lacks its value or goes with no other; or a setting has no key.
    """
    found, unknown = _Flags(add_help=False, parents=[get_args_parser()]).parse_known_args(arguments)
    problems = [_unknown_flag(flag, typed) for flag in unknown]
    if found.multirun and (found.cfg or found.info):
        problems += ["-m trains the jobs of a sweep; to see the config of one, leave it out, and type the job's values"]
    if problems := problems or [problem for override in found.overrides for problem in _beyond_reading(override)]:
        raise RefusedRequest(problems)


def _beyond_reading(override: str) -> Iterator[str]:
    typed = override.removeprefix("++")
    start = typed[:_SHOWN] + ("" if len(typed) <= _SHOWN else "…")
    if override and not _KEY.match(override):
        yield f"{start}: found no key; a setting is KEY=VALUE"
    if key_and_value(override)[0] == "hydra.verbose":
        yield f"{start}: Hydra's log is disabled; type --info all for how the config is composed, or --cfg job for it"


class _Flags(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedRequest([f"{message}; a setting is KEY=VALUE, and --help lists all settings"])


def _unknown_flag(flag: str, typed: list[str]) -> str:
    """Return the message for a flag of other frameworks: `--learning_rate 1e-4`, `--max-steps=9` or `--fp16`."""
    key, equals, value = flag.lstrip("-").partition("=")
    after = next((word for before, word in pairwise(typed) if before == flag), "-")
    if not equals and not re.search("^-|=", after):
        flag, value = f"{flag} {after}", after
    known = aliases.instead(key, value or "true") or (value and f"{key}={value}")
    meant = aliases.advice(known) if known else "a setting is KEY=VALUE"
    return f"unrecognized arguments: {flag}; {meant}, and --help lists all settings"


def problems_of_composition(error: BaseException) -> list[str]:
    """Return messages for an error that Hydra raised while it composed the config or created the run directory."""
    refusal: BaseException | None = error
    while refusal is not None and not isinstance(refusal, Refused):  # one that a resolver has raised
        refusal = refusal.__cause__ or refusal.__context__
    if refusal is not None:
        return refusal.problems
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        root: Any = cause.parent_node._get_root()
        lacking = {str(cause.full_key): cause.parent_node, **dict.fromkeys(_others_keys(root), root)}
        return [f"{key}: there is no such key.{_meant(key, node)}" for key, node in lacking.items()]
    return [_line(error, cause)]


def _line(error: BaseException, cause: BaseException | None) -> str:
    text = str(error)
    if isinstance(error, MarkedYAMLError) and (at := error.problem_mark) is not None:
        found = ", ".join(part for part in (error.context, error.problem) if part)
        return f"{at.name}, line {at.line + 1}, column {at.column + 1}: {found}"
    if isinstance(error, NO_YAML):
        return f"a config file is not text in UTF-8: {' '.join(text.split())}; save it in UTF-8"
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # some of Hydra's errors are OSErrors
        if str(error.filename).endswith(".yaml"):
            return f"{error.filename} can't be read: {error.strerror}; mend it, or remove it"
        return f"the run directory can't be made: {error}; type hydra.run.dir=FOLDER"
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        return _unparsed(str(error.override).removeprefix("++"))
    if isinstance(error, InterpolationToMissingValueError) and (missing := re.search(r"value: ([\w.]+)", text)):
        return f"{missing[1]}: there is no default; type {missing[1]}=VALUE"
    if isinstance(error, InterpolationKeyError):
        return f"{error.full_key}: {text.splitlines()[0]}; add that key to the config"
    if match := re.match(r"Could not append to config. An item is already at '(.+?)'", text):
        return f"+{match[1]}: the config already has that key; type {match[1]}=VALUE"
    if match := re.match(r"Could not override '(.+?)'\.", text):
        key = aliases.setting(match[1])  # a fork may lack a group of this name
        hint = f" Did you mean {key}?" if key else nearest(match[1], GROUPS) or " Leave that out"
        return f"{match[1]}: there is no such group.{hint}"
    if match := re.match(r"(?:Multiple values for )?([\w/]+)(?: appears more than once|\. To override)", text):
        return f"+{match[1]}: the config already has that choice; type {match[1]}=CHOICE"
    if match := re.match(r"Ambiguous value for argument '\+*(.+?)=(.*)'", text):
        key, values = match[1], match[2]
        return f"{key}={values}: found several values; type -m for a run of each, or {key}=[{values}] for a list"
    if match := re.match(r"Could not delete from config. '(.+)' does not exist", text):  # null counts as missing
        return f"~{match[1]}: there is no such key, or it is null already; leave that out"
    lines = [line.strip().rstrip(".") for line in f"{text}\n{cause or ''}".splitlines()]
    told = [line for line in lines if line and not line.startswith(("See https", "object_type", "full_key"))]
    return "; ".join(dict.fromkeys(told))


def _missing_config(error: MissingConfigException) -> str:
    group, slash, choice = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    if folder := re.search(r"directory '(.+)' exists", str(error)):
        return f"--config-path: there is no folder {folder[1]}; leave it out, or type --config-dir=FOLDER to add one"
    if not slash:
        meant = aliases.advice(aliases.instead(f"config={choice}") or "leave it out")
        return f"--config-name={error.missing_cfg_file}: there is no such config; {meant}"
    if group == "num_nodes" and choice.isdecimal():
        return f"num_nodes={choice}: there is no file of that number; type trainer.num_nodes={choice}"
    # for a list such as callbacks=[default,…], Hydra's error has only the search path
    folders = re.findall(r"path=file://(.+)", str(error))
    choices = sorted(error.options or {one.stem for folder in folders for one in Path(folder, group).glob("*.yaml")})
    other = aliases.choice(group, choice)
    if (typed := aliases.instead(f"{group}={choice}")) and not other:
        return f"{group}={choice}: there is no such {group}; {aliases.advice(typed)}"
    if extra := _OF_EXTRAS.get(f"{group}/{choice}"):
        return f"{group}={choice}: its package is not installed; type pip install -e '.[{extra}]'"
    hint = f" Did you mean {other}?" if other in choices else nearest(choice, choices)
    if choice and not hint and group in _SETS:
        hint = f" For your own class: {group}.{choice}._target_=my.Class."
    return f"{group}={choice}: there is no such {group}.{hint} Choices: {', '.join(choices)}"


def _unparsed(override: str) -> str:
    if (spaced := re.fullmatch(r"([\w.]+) *= *(\S+)", override, re.ASCII)) and " " in override:
        return f"{override}: a setting has no spaces; type {spaced[1]}={spaced[2]}"
    if re.fullmatch(r"\+?[\w.@/-]+", override, re.ASCII):
        before = next((typed for typed, word in pairwise(sys.argv) if word == override), "")
        if re.fullmatch(r"[\w.]+=", before):
            return f"{before} {override}: a setting has no spaces; type {before}{override}"
        meant = f"mode={override}" if override in MODES else f"{override}=VALUE"  # as in LightningCLI: train.py fit
        return f"{override}: it has no value; type {meant}"
    key, _, value = override.partition("=")
    if key == "init_names" and re.match(r"\{\s*(''|\"\")?\s*:", value):
        return f"{override}: Hydra can't read this; for a prefix before each name, type 'init_names={{.: net.}}'"
    quoted = shlex.quote('{}="{}"'.format(key, value.replace('"', '\\"')))
    return f"{override}: Hydra can't read this value; close its brackets, or type {quoted} for a text"


def _others_keys(root: Any) -> list[str]:
    """Return all typed top-level keys that only other frameworks have: Hydra reports the first missing key."""
    typed = (key_and_value(word)[0] for word in sys.argv[1:] if re.match(r"[\w.]+=", word))
    nodes = {key.partition(".")[0]: key for key in typed}
    return [node for node, key in nodes.items() if node not in {*root, *GROUPS} and aliases.instead(key)]


def _meant(key: str, node: DictConfig) -> str:
    """Return a hint such as ' Type X=3' for another framework's key, or an empty string.

    Without an equivalent, it is ' Did you mean X?' with a key of the same name elsewhere in the config, else the most
    similar key.
    """
    *above, name = key.split(".")
    typed, value = key, "VALUE"  # for `paths.log_dir=x`, Hydra reports only `paths`
    for word, given in map(key_and_value, reversed(sys.argv[1:])):
        if f"{word}.".startswith(f"{key}."):
            typed, value = word, given
    root, known = node._get_root(), aliases.instead(typed, value) or ""
    if own := _of_model(root, known.partition("=")[0]):
        return f" Type {own}={value}"
    if above and above[0] in CONSTRUCTED:  # typed keys are added, so this one is in a sweep's params
        return f" In a sweep's params, a new key begins with +: +{key}"
    if known:
        meant = aliases.advice(known)
        return f" {meant[0].upper()}{meant[1:]}"
    if elsewhere := sorted(f"{group}.{name}" for group in root if name in raw_keys(root._get_node(group))):
        return f" Did you mean {listed(elsewhere, separator=' or ')}?"
    keys = {*map(str, node), *(() if above else GROUPS)}
    return nearest(name, keys, alike=0.5 if above else 0.65)


def _of_model(root: Any, key: str) -> str | None:
    """Return the key of the model's config for an optimizer or scheduler key, if it has one; else None."""
    group, _, name = key.partition(".")
    model = root.get("model")
    if not isinstance(model, DictConfig) or group not in ("optimizer", "scheduler"):
        return None
    if group in model:  # the model's config has such a node
        return f"model.{key}" if name in raw_keys(model._get_node(group)) else None
    own = raw_keys(model)
    return next((f"model.{one}" for one in (name, *aliases.names(key)) if one in own), None)
