"""Command-line overrides: their conversion to the form that Hydra takes, and the names and choices that they give."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch.errors import RefusedRequest

AUTO = "auto"  # a value that the run finds, as the micro-batch size
MODES = ("fit", "validate", "test", "predict", "plan", "dry_run", "check")

# Groups whose files hold the arguments of a constructor; an override may set any argument, listed in the file or not.
CONSTRUCTED = ("model", "data", "trainer", "optimizer", "scheduler", "callbacks", "logger", "cluster", "compile")
GROUPS = (*CONSTRUCTED, "strategy", "precision", "num_nodes", "device", "experiment", "debug")
_NAMES = ("run_id", "name")
_VALUES = ("true", "false", "null", "inf", "nan")  # words that Hydra does not parse as strings
_REPLACEABLE = ("model", "data", "optimizer", "scheduler")
_PARTIAL = ("optimizer", "scheduler")
_VALUED_FLAGS = {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "-p", "--package"}
_VALUED_FLAGS |= {"--experimental-rerun", "-e", "--cfg", "-c", "--info", "-i"}
_SWEEPS = {"-m", "--multirun"}


def normalised(arguments: list[str], rank: int = 0) -> list[str]:
    """Return ``sys.argv[1:]`` with flags first, `++` before constructor arguments, and replaced groups emptied.

    The flag `--local-rank`, which `torch.distributed.launch` adds, is dropped: LOCAL_RANK is also exported.
    """
    flags, overrides = _split([word for word in arguments if not re.match(r"--local[-_]rank=", word)])
    is_sweep = asks_for_a_sweep(arguments)
    overrides = [_addable(_choosing(_named(override, is_sweep))) for override in overrides]
    quiet = ["hydra.job_logging.root.handlers=[console]"] if rank else []  # rank 0 alone writes the run's log
    return flags + _emptied(overrides) + overrides + quiet


def shortened(override: str) -> str:
    """Convert an override from `normalised` back to the form that a person types."""
    short = override.removeprefix("++")
    override = short if _addable(short) == override else override
    return re.sub(r"^([^=]+)='([\w.-]*/[\w./-]*)'$", r"\1=\2", override, flags=re.ASCII)  # such a path needs no quotes


def key_and_value(override: str) -> tuple[str, str]:
    """Return the key of an override, without leading `+`, and its value."""
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def raw_keys(node: Any) -> list[Any]:
    """Return the keys of a node; none of null, a plain value or an interpolation, which is not resolved."""
    return list(node) if isinstance(node, DictConfig) and not (node._is_none() or node._is_interpolation()) else []


def asks_for_a_sweep(arguments: list[str]) -> bool:
    """Return whether a command line has the multirun flag, `-m` or `--multirun`."""
    return not _SWEEPS.isdisjoint(arguments)


def asks_for_help(arguments: Sequence[str]) -> str | None:
    """Return the word after `--help` or `-h`: a group, a choice, or an empty string; None without the flag."""
    flags = [number for number, word in enumerate(arguments) if word in ("--help", "-h")]
    if not flags:
        return None
    return " ".join(arguments[flags[0] + 1 : flags[0] + 2])


def flags_of_a_job(arguments: list[str]) -> list[str]:
    """Return the flags of a sweep's command line that also go to each of its jobs."""
    return [flag for flag in _split(arguments)[0] if flag not in _SWEEPS]


def quoted(text: str) -> str:
    """Return a text as the value of an override, quoted if needed, so that Hydra reads exactly this text."""
    if re.fullmatch(r"[\w.-]*/[\w./-]+|[a-z_][\w.-]*", text, re.ASCII | re.IGNORECASE) and text.lower() not in _VALUES:
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate flags from overrides: Lightning appends overrides for its ranks, and these may not follow a flag."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        belongs = bool(flags) and flags[-1] in _VALUED_FLAGS
        (flags if argument.startswith("-") or belongs else overrides).append(argument)
    return flags, overrides


def _named(override: str, is_sweep: bool) -> str:
    """Quote the value of a name: Hydra parses 1234_5 as a number, and fails on `a,b` and `it's`."""
    key, equals, name = override.partition("=")
    if not equals or key.lstrip("+") not in _NAMES or "${" in name or (is_sweep and re.search("[,(]", name)):
        return override
    return override if re.fullmatch(r"'.*'|\".*\"", name) else f"{key}={quoted(name)}"


def _choosing(override: str) -> str:
    """Quote choices that look like numbers or booleans (`precision=16,32`), and convert `debug=null` to `~debug`.

    Hydra crashes on both. `trainer.strategy=ddp`, which Lightning's users know, becomes `strategy=ddp`, and
    `plan.device=h100` becomes `device=h100`, the group that fills this key.
    """
    override = re.sub(r"^plan\.device=(?=\w)", "device=", override)
    group, _, choice = override.partition("=")
    if re.fullmatch(r"\+*trainer\.strategy=[\w-]+", override):
        group, override = "strategy", f"strategy={choice}"
    if group not in GROUPS:
        return override
    if choice == "null":
        return f"~{group}"
    if not re.fullmatch(r"[\w.-]+( *, *[\w.-]+)*", choice):
        return override
    if "null" in re.split(" *, *", choice.lower()):
        raise RefusedRequest([f"{override}: a sweep can't leave a group out; type {group}=null in a run of its own"])
    quoted_ones = re.sub(r"(?<![\w.-])([\d.]+|true|false)(?![\w.-])", r"'\1'", choice, flags=re.IGNORECASE)
    return f"{group}={quoted_ones}"


def _addable(override: str) -> str:
    """Put `++` before constructor arguments, typed with or without `+`; preflight reports nonexistent arguments."""
    argument = re.match(rf"\+?((?:{'|'.join(CONSTRUCTED)})\.[^=@]+=.*)", override, re.DOTALL)
    return f"++{argument[1]}" if argument else override


def _emptied(overrides: list[str]) -> list[str]:
    """Return overrides that empty the groups whose `_target_` is overridden: their arguments are for another class."""
    keys = {key for key, _ in map(key_and_value, overrides)}
    replaced = [group for group in _REPLACEABLE if f"{group}._target_" in keys and not {group, f"~{group}"} & keys]
    partial = [f"++{group}._partial_=true" for group in replaced if group in _PARTIAL]
    return [f"~{group}" for group in replaced] + partial


def typed_overrides(hydra: HydraConf) -> list[str]:
    """Return the command line's overrides as typed; reading them one by one would resolve their interpolations."""
    typed: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return list(typed)


def typed_keys(hydra: HydraConf) -> set[str]:
    """Return the keys that the command line sets; a module's requirements may change the defaults of other keys."""
    return {key_and_value(override)[0] for override in typed_overrides(hydra)}


_LONGEST_NAME = 128


def check_names(cfg: DictConfig) -> None:
    """Check a run's name, run_id and folder before anything is created.

    Raises:
        RefusedRequest: they are not valid directory names, or the folder is an address, such as s3://bucket/run.
    """
    key = f"hydra.{'sweep' if cfg.hydra.mode == RunMode.MULTIRUN else 'run'}.dir"
    try:
        names = {name: str("" if cfg[name] is None else cfg[name]) for name in _NAMES if name in cfg}
        folder = str(OmegaConf.select(cfg, key))
    except OmegaConfBaseException:  # Hydra or the run reports it later
        return
    problems = [
        f"{name}={text[:_LONGEST_NAME]!r} is no valid name: 1 to {_LONGEST_NAME} letters, digits and . _ - = , "
        f"are allowed; type {name}=NAME"
        for name, text in names.items()
        if not re.fullmatch(rf"[A-Za-z0-9._=,-]{{1,{_LONGEST_NAME}}}", text) or text in (".", "..")
    ]
    if re.match(r"\w[\w.+-]*://", folder) and not problems:
        problems = [
            f"{key}={folder}: found an address, and a run's folder is on a file system; "
            f"type {key}=FOLDER, of a mounted bucket or a local disk, and copy it when the run has ended"
        ]
    if problems:
        raise RefusedRequest(problems)


def files_of_group(hydra: HydraConf, group: str) -> dict[str, Path]:
    """Return the file of each choice of a group, by name; if two folders have the name, the file that Hydra takes."""
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return {name: path for name, path in sorted(found.items()) if path.is_file()}  # a link to nothing is a lock
