"""One-line messages for Hydra's errors: what was found, what was expected, and what to type instead."""

from __future__ import annotations

import re
import shlex
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
)
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]  # PyYAML has no types of its own
from yaml.reader import ReaderError  # type: ignore[import-untyped]  # nor has this part of it

from lightswitch.config import aliases
from lightswitch.config.overrides import CONSTRUCTED, GROUPS, key_and_value
from lightswitch.config.values import ALLOWED
from lightswitch.errors import RefusedRequest, listed, nearest

_KEY = re.compile(r"[+~]*[^\W\d][\w@/-]*(\.[\w@/-]+)*( *=|$)")
_SHOWN = 80  # characters to show of a long setting
_DEEPEST = 32  # nested brackets: Hydra's parser is recursive
_MOST_DIGITS = 4300  # that Python converts to an integer
NO_YAML = (YAMLError, UnicodeDecodeError)  # errors of reading a config file that is not valid YAML

_SETS = ("callbacks", "logger")  # groups of which a run can have several choices
_OF_EXTRAS = {  # Hydra plugins, and the extra that installs each
    "hydra/sweeper/optuna": "optuna",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
}


def check_flags(arguments: list[str], typed: list[str]) -> None:
    """Check the command line's words, to report problems without Hydra's usage text or traceback.

    Args:
        arguments: the words as `normalised` returns them.
        typed: the words in the order in which they were typed.

    Raises:
        RefusedRequest: a flag does not exist, lacks its value or `--cfg`, or would make Hydra unpickle a file; or Hydra
            can't parse a setting.
    """
    found, unknown = _Flags(add_help=False, parents=[get_args_parser()]).parse_known_args(arguments)
    if unknown:
        raise RefusedRequest([_unknown_flag(flag, typed) for flag in unknown])
    if found.experimental_rerun is not None:
        raise RefusedRequest(
            [
                f"--experimental-rerun={found.experimental_rerun} unpickles a file, which may run code; "
                "type the command from run.json"
            ]
        )
    if found.resolve and not found.cfg:
        raise RefusedRequest(["--resolve: found no --cfg, which it requires; type --cfg job --resolve"])
    if problems := [problem for override in found.overrides for problem in _beyond_reading(override)]:
        raise RefusedRequest(problems)


def _beyond_reading(override: str) -> Iterator[str]:
    typed = override.removeprefix("++")
    start = typed[:_SHOWN] + ("" if len(typed) <= _SHOWN else "…")
    if override and not _KEY.match(override):
        yield f"{start}: found no key; a setting is KEY=VALUE"
    if key_and_value(override)[0] == "hydra.verbose":
        yield (
            f"{start}: Hydra's log is disabled; type --info all for how the config is composed, or --cfg job for the "
            "config"
        )
    depths = accumulate((mark in "[{(") - (mark in "]})") for mark in override)
    if max(depths, default=0) > _DEEPEST:
        yield f"{start}: found brackets nested deeper than {_DEEPEST} levels; type a flatter value"
    if re.search(rf"\d{{{_MOST_DIGITS + 1}}}", override):
        yield f"{start}: found a number of more than {_MOST_DIGITS} digits; type a smaller one"


class _Flags(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedRequest([f"{message}; a setting is KEY=VALUE, and --help lists all settings"])


def _unknown_flag(flag: str, typed: list[str]) -> str:
    """Return the message for a flag of other frameworks: `--learning_rate 1e-4`, `--max-steps=9` or `--fp16`."""
    key, equals, value = flag.lstrip("-").partition("=")
    after = next((word for before, word in pairwise(typed) if before == flag), "-")
    if not equals and not re.search("^-|=", after):
        flag, value = f"{flag} {after}", after
    if known := aliases.instead(key, value or "true"):
        meant = aliases.advice(known)
    else:
        meant = f"type {key}={value}" if value else "a setting is KEY=VALUE"
    return f"unrecognized arguments: {flag}; {meant}, and --help lists all settings"


def problems_of_composition(error: BaseException) -> list[str]:
    """Return messages for an error that Hydra raised while it composed the config or created the run directory."""
    if (refusal := _refusal_behind(error)) is not None:
        return refusal.problems
    if isinstance(error, NO_YAML):
        return [_no_yaml(error)]
    if isinstance(error, OSError) and str(error.filename).endswith(".yaml"):
        return [f"{error.filename} can't be read: {error.strerror}; mend it, or remove it"]
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # some of Hydra's errors are OSErrors
        typed = [word for word in sys.argv if re.match(r"(hydra\.run\.dir|name|run_id)=.*oc\.env", word)]
        line = f"{' '.join(typed)}: {error.strerror}" if typed else error  # the error shows the variable's value
        return [f"the run directory can't be made: {line}; type hydra.run.dir=FOLDER"]
    if isinstance(error, MissingConfigException) and (folder := re.search(r"directory '(.+)' exists", str(error))):
        return [f"--config-path: there is no folder {folder[1]}; leave it out, or type --config-dir=FOLDER to add one"]
    if isinstance(error, MissingConfigException) and "/" not in (name := error.missing_cfg_file or ""):
        instead = aliases.instead(f"config={name.removesuffix('.yaml')}") or "leave it out"
        return [f"--config-name={name}: there is no such config; {aliases.advice(instead)}"]
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        return [_missing_choice(error)]
    if isinstance(error, OverrideParseException):
        return [_unparsed(str(error.override).removeprefix("++"), error)]
    if isinstance(error, InterpolationToMissingValueError) and (missing := re.search(r"value: ([\w.]+)", str(error))):
        return [f"{missing[1]}: there is no default; type {missing[1]}=VALUE"]
    if isinstance(error, InterpolationKeyError):
        return [f"{error.full_key}: {str(error).splitlines()[0]}; add that key to the config"]
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        root: Any = cause.parent_node._get_root()
        lacking = {str(cause.full_key): cause.parent_node, **dict.fromkeys(_others_keys(root), root)}
        return [f"{key}: there is no such key.{_meant(key, node)}" for key, node in lacking.items()]
    if added := re.match(r"Could not append to config. An item is already at '(.+?)'", str(error)):
        return [f"+{added[1]}: the config already has that key; type {added[1]}=VALUE"]
    if group := re.match(r"Could not override '(.+?)'\.", str(error)):
        key = aliases.setting(group[1])  # a fork may lack a group of this name
        hint = f" Did you mean {key}?" if key else nearest(group[1], GROUPS) or " Leave that out"
        return [f"{group[1]}: there is no such group.{hint}"]
    if twice := re.match(r"(?:Multiple values for )?([\w/]+)(?: appears more than once|\. To override)", str(error)):
        return [f"+{twice[1]}: the config already has that choice; type {twice[1]}=CHOICE"]
    if several := re.match(r"Ambiguous value for argument '\+*(.+?)=(.*)'", str(error)):
        key, values = several[1], several[2]
        return [f"{key}={values}: found several values; type -m for a run of each, or {key}=[{values}] for a list"]
    if unresolved := re.match(r"Error resolving interpolation '(.+?)'", str(error)):  # Hydra 1.4 resolves none
        setting = next((word for word in sys.argv if word.endswith(f"={unresolved[1]}")), f"GROUP={unresolved[1]}")
        chosen, _, _ = setting.partition("=")
        return [f"{setting}: a choice takes no resolver; let the shell insert a variable: {chosen}=$NAME"]
    if deleted := re.match(r"Could not delete from config. '(.+)' does not exist", str(error)):
        return [_nothing_to_delete(deleted[1], error)]
    return [_in_one_line(f"{error}\n{cause or ''}")]


def _no_yaml(error: YAMLError | UnicodeDecodeError) -> str:
    """Return a message with the location and the reason of invalid YAML."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        at, line = error.problem_mark, ", ".join(part for part in (error.context, error.problem) if part)
        return f"{at.name}, line {at.line + 1}, column {at.column + 1}: {line}"
    if isinstance(error, ReaderError):
        return f"{error.name}: found the character #x{error.character:04x}, which YAML does not allow"
    return f"{_file_that_was_read(error)}: found the byte 0x{error.object[error.start]:02x}; save the file in UTF-8"


def _file_that_was_read(error: BaseException) -> str:
    """Return the file that Hydra was reading, from the traceback's frames: a decoding error does not name its file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "full_path" in frame.f_locals]
    return str(frames[-1].f_locals["full_path"]) if frames else "a config file"


def _unparsed(override: str, error: OverrideParseException) -> str:
    if " " in override and (spaced := re.fullmatch(r"([\w.]+) *= *(\S+)", override, re.ASCII)):
        return f"{override}: a setting has no spaces; type {spaced[1]}={spaced[2]}"
    if re.fullmatch(r"\+?[\w.@/-]+", override, re.ASCII):
        before = next((typed for typed, word in pairwise(sys.argv) if word == override), "")
        if re.fullmatch(r"[\w.]+=", before):
            return f"{before} {override}: a setting has no spaces; type {before}{override}"
        is_mode = override in ALLOWED["mode"]  # as in LightningCLI: train.py fit
        return f"{override}: it has no value; type {f'mode={override}' if is_mode else f'{override}=VALUE'}"
    if (mark := _unclosed(override)) is not None:
        return f"{override}: found an unmatched {mark}; type the matching bracket"
    if quoted := _in_quotes(override):
        return f"{override}: Hydra requires quotes here; type {quoted}"
    return f"{override}: {str(error).splitlines()[0]}"


def _unclosed(override: str) -> str | None:
    """Return a bracket outside of quotes that has no match; None if all match."""
    opened: list[str] = []
    for mark in re.sub(r"'[^']*'|\"[^\"]*\"", "", override):
        if mark in "[{(":
            opened.append(mark)
        elif mark in "]})" and (not opened or opened.pop() + mark not in ("[]", "{}", "()")):
            return mark
    return opened[-1] if opened else None


def _in_quotes(override: str) -> str | None:
    """Return an override, escaped for a shell, with quotes around values that Hydra can't parse without.

    Returns:
        None if quotes are not enough.
    """
    key, _, value = override.partition("=")
    items = value[1:-1].split(",") if re.fullmatch(r"\[.*\]", value) else [value]
    if re.search(r"[][{}\\]", "".join(items)) or any(item.lstrip().startswith('"') for item in items):
        return None
    escaped = [item.strip().replace('"', '\\"') for item in items]
    line = ",".join(item if re.fullmatch(r"[\w./*-]+", item, re.ASCII) else f'"{item}"' for item in escaped)
    return shlex.quote(f"{key}=[{line}]" if value.startswith("[") else f"{key}={line}")


def _others_keys(root: Any) -> list[str]:
    """Return all typed top-level keys that only other frameworks have: Hydra reports the first missing key."""
    typed = (key_and_value(word)[0] for word in sys.argv[1:] if re.match(r"[\w.]+=", word))
    nodes = {key.partition(".")[0]: key for key in typed}
    return [node for node, key in nodes.items() if node not in _keys(root, at_top=True) and aliases.instead(key)]


def _meant(key: str, node: DictConfig) -> str:
    """Return a hint such as ' Type X=3' for another framework's key, or an empty string.

    Without an equivalent, it is ' Did you mean X?' with a key of the same name elsewhere in the config, else the most
    similar key.
    """
    *above, name = key.split(".")
    root, (typed, value) = node._get_root(), _typed(key)
    known = aliases.instead(typed, value) or ""
    if own := _of_model(root, known.partition("=")[0]):
        return f" Type {own}={value}"
    if above and above[0] in CONSTRUCTED:  # typed keys are added, so this one is in a sweep's params
        return f" In a sweep's params, a new key begins with +: +{key}"
    if known:
        meant = aliases.advice(known)
        return f" {meant[0].upper()}{meant[1:]}"
    if elsewhere := sorted(f"{group}.{name}" for group in root if name in _raw_keys(root._get_node(group))):
        return f" Did you mean {listed(elsewhere, separator=' or ')}?"
    return nearest(name, _keys(node, at_top=not above), alike=0.5 if above else 0.65)


def _typed(key: str) -> tuple[str, str]:
    """Return a missing key in full and its value, as typed: for `paths.log_dir=x`, Hydra reports only `paths`."""
    typed = (key_and_value(word) for word in sys.argv[1:])
    return next(((word, value) for word, value in typed if f"{word}.".startswith(f"{key}.")), (key, "VALUE"))


def _of_model(root: Any, key: str) -> str | None:
    """Return the key of the model's config for an optimizer or scheduler key, if it has one; else None."""
    group, _, name = key.partition(".")
    model = root.get("model")
    if not isinstance(model, DictConfig) or group not in ("optimizer", "scheduler"):
        return None
    if group in model:  # the model's config has such a node
        return f"model.{key}" if name in _raw_keys(model._get_node(group)) else None
    own = _raw_keys(model)
    return next((f"model.{one}" for one in (name, *aliases.names(key)) if one in own), None)


def _raw_keys(node: Any) -> list[Any]:
    """Return the keys of a node; none for null, a plain value or an interpolation, which is not resolved."""
    return list(node) if isinstance(node, DictConfig) and not (node._is_none() or node._is_interpolation()) else []


def _keys(node: DictConfig, at_top: bool) -> set[str]:
    """Return a node's keys, at the top level together with the groups, which may fill keys elsewhere."""
    return {*map(str, node), *(GROUPS if at_top else ())}


def _refusal_behind(error: BaseException | None) -> RefusedRequest | None:
    """Return the RefusedRequest that a resolver raised and OmegaConf wrapped in its error; None if none."""
    while error is not None and not isinstance(error, RefusedRequest):
        error = error.__cause__ or error.__context__
    return error


def _missing_choice(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    if group == "num_nodes" and choice.isdecimal():
        return f"num_nodes={choice}: there is no file of that number; type trainer.num_nodes={choice}"
    choices = sorted(error.options or _files_of(group, str(error)))
    other = aliases.choice(group, choice)
    if (typed := aliases.instead(f"{group}={choice}")) and not other:
        return f"{group}={choice}: there is no such {group}; {aliases.advice(typed)}"
    if extra := _OF_EXTRAS.get(f"{group}/{choice}"):
        return f"{group}={choice}: its package is not installed; type pip install -e '.[{extra}]'"
    found = next((word for word in sys.argv if word.startswith(f"{group}=") and "oc.env" in word), f"{group}={choice}")
    hint = f" Did you mean {other}?" if other in choices else nearest(choice, choices)
    if choice and not hint and group in _SETS:
        hint = f" For your own class: {group}.{choice}._target_=my.Class."
    return f"{found}: there is no such {group}.{hint} Choices: {', '.join(choices)}"


def _files_of(group: str, message: str) -> set[str]:
    """Return a group's choices: for a list like `callbacks=[default,…]`, Hydra's error has only the search path."""
    folders = re.findall(r"path=file://(.+)", message)
    return {file.stem for folder in folders for file in Path(folder, group).glob("*.yaml")}


def _nothing_to_delete(path: str, error: BaseException) -> str:
    """Return a message about deleting a missing key; the config comes from the frame that raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    parent, _, key = path.rpartition(".")
    cfg = frame.f_locals.get("cfg")
    there = OmegaConf.select(cfg, parent) if parent and cfg is not None else cfg
    if isinstance(there, DictConfig) and key in there:  # Hydra treats null as missing
        return f"~{path}: it is null already; leave that out"
    choices = _keys(there, at_top=not parent) if isinstance(there, DictConfig) else ()
    return f"~{path}: there is no such key.{nearest(key, choices) or ' Leave that out'}"


def _in_one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    report = [line for line in lines if line and not line.startswith(("See https", "object_type", "full_key"))]
    return "; ".join(dict.fromkeys(report))
