"""From the command line to a composed config: overrides in the form that Hydra takes, composed in less time."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.conf import HydraConf
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.config.confidential import Cleaner
from lightswitch.config.values import name_problems
from lightswitch.errors import RefusedRequest

# Groups whose file is the arguments of one constructor: any argument of it may be given, listed in the file or not.
CONSTRUCTED = ("model", "data", "trainer", "optimizer", "scheduler", "callbacks", "logger", "cluster", "compile")
GROUPS = (*CONSTRUCTED, "strategy", "precision", "device", "experiment", "debug")
_NAMES = ("run_id", "name")
_VALUES = ("true", "false", "null", "inf", "nan")  # words that Hydra does not read as text
_REPLACEABLE = ("model", "data", "optimizer", "scheduler")
_PARTIAL = ("optimizer", "scheduler")
_VALUED_FLAGS = {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "-p", "--package"}
_VALUED_FLAGS |= {"--experimental-rerun", "-e", "--cfg", "-c", "--info", "-i"}
_SWEEPS = {"-m", "--multirun"}


def normalised(arguments: list[str], rank: int = 0) -> list[str]:
    """Return ``sys.argv[1:]`` with flags first, `++` before arguments of constructors, and replaced groups emptied.

    The flag that `torch.distributed.launch` adds is dropped: LOCAL_RANK is exported as well.
    """
    flags, overrides = _split([word for word in arguments if not re.match(r"--local[-_]rank=", word)])
    is_sweep = asks_for_a_sweep(arguments)
    overrides = [_addable(_choosing(_named(override, is_sweep))) for override in overrides]
    return flags + _emptied(overrides) + overrides + _quiet_ranks(rank)


def shortened(override: str) -> str:
    """Return an override that `normalised` made as a person types it."""
    short = override.removeprefix("++")
    override = short if _addable(short) == override else override
    return re.sub(r"^([^=]+)='([\w.-]*/[\w./-]*)'$", r"\1=\2", override, flags=re.ASCII)  # a path that needs no quotes


def key_and_value(override: str) -> tuple[str, str]:
    """Return the two sides of an override, the key without the `+` that Hydra asks for."""
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def asks_for_a_sweep(arguments: list[str]) -> bool:
    """Return whether a command line has the flag for many runs, `-m`."""
    return not _SWEEPS.isdisjoint(arguments)


def asks_for_help(arguments: Sequence[str]) -> str | None:
    """Return what help is asked for: nothing for all of it, a group or a choice; None where no help is."""
    flags = [number for number, word in enumerate(arguments) if word in ("--help", "-h")]
    if not flags:
        return None
    return " ".join(arguments[flags[0] + 1 : flags[0] + 2])


def flags_of_a_job(arguments: list[str]) -> list[str]:
    """Return the flags of a sweep's command line that each of its jobs is given, too."""
    return [flag for flag in _split(arguments)[0] if flag not in _SWEEPS]


def quoted(text: str) -> str:
    """Return a text as the value of an override, quoted so that Hydra reads the same text, whatever it contains."""
    if re.fullmatch(r"[\w.-]*/[\w./-]+|[a-z_][\w.-]*", text, re.ASCII | re.IGNORECASE) and text.lower() not in _VALUES:
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate flags from overrides: Lightning appends overrides in ranks it starts, and they may not follow a flag."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        belongs = bool(flags) and flags[-1] in _VALUED_FLAGS
        (flags if argument.startswith("-") or belongs else overrides).append(argument)
    return flags, overrides


def _named(override: str, is_sweep: bool) -> str:
    """Quote the value of a name: Hydra reads 1234_5 as a number, and fails on a,b and it's."""
    key, equals, name = override.partition("=")
    if not equals or key.lstrip("+") not in _NAMES or "${" in name or (is_sweep and re.search("[,(]", name)):
        return override
    return override if re.fullmatch(r"'.*'|\".*\"", name) else f"{key}={quoted(name)}"


def _choosing(override: str) -> str:
    """Quote `precision=16`, a name that reads as a number, and make `debug=null` `~debug`; Hydra crashes on both.

    `trainer.strategy=ddp`, as Lightning has it, is the choice of that name; so is `plan.device=h100`, whose file sits
    where its key is.
    """
    override = re.sub(r"^plan\.device=(?=\w)", "device=", override)
    group, _, choice = override.partition("=")
    if re.fullmatch(r"\+*trainer\.strategy=[\w-]+", override):
        group, override = "strategy", f"strategy={choice}"
    if group not in GROUPS:
        return override
    if choice == "null":
        return f"~{group}"
    return f"{group}='{choice}'" if re.fullmatch(r"[\d.]+|true|false", choice, re.IGNORECASE) else override


def _addable(override: str) -> str:
    """Put `++` before arguments of constructors, with or without the `+` that a config without them asks for; preflight
    reports those that a constructor does not take."""
    argument = re.match(rf"\+?((?:{'|'.join(CONSTRUCTED)})\.[^=@]+=.*)", override, re.DOTALL)
    return f"++{argument[1]}" if argument else override


def _emptied(overrides: list[str]) -> list[str]:
    """Return overrides that empty the groups whose `_target_` is replaced: their arguments are another class's."""
    keys = {key for key, _ in map(key_and_value, overrides)}
    replaced = [group for group in _REPLACEABLE if f"{group}._target_" in keys and not {group, f"~{group}"} & keys]
    partial = [f"++{group}._partial_=true" for group in replaced if group in _PARTIAL]
    return [f"~{group}" for group in replaced] + partial


def _quiet_ranks(rank: int) -> list[str]:
    """Return the override that keeps ranks other than 0 from writing the run's log."""
    if rank == 0:
        return []
    return ["hydra.job_logging.root.handlers=[console]"]


def typed_overrides(hydra: HydraConf) -> list[str]:
    """Return the command line's overrides as typed; read one by one, their interpolations would be resolved."""
    typed: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return list(typed)


def typed_keys(hydra: HydraConf) -> set[str]:
    """Return the keys that the command line sets; what nobody typed gives way to what a module needs."""
    return {key_and_value(override)[0] for override in typed_overrides(hydra)}


def patch_composition() -> None:
    """Keep the config that Hydra composes to see whether it asks for a sweep, and would compose again to run it."""
    look = Hydra.get_mode

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        if asks_for_a_sweep(sys.argv[1:]):  # also if it has a single job
            return look(self, config_name, overrides)
        try:
            cfg = self.compose_config(config_name, overrides, run_mode=RunMode.RUN)
        except (HydraException, OmegaConfBaseException):
            return look(self, config_name, overrides)  # a sweep, or a problem that the run will report
        check_names(cfg)
        if cfg.hydra.mode != RunMode.MULTIRUN:
            patches.replace(self.config_loader, "load_configuration", lambda *_, **__: cfg)
        return cfg.hydra.mode

    patches.replace(Hydra, "get_mode", get_mode)


def check_names(cfg: DictConfig) -> None:
    """Check a run's name and id before a directory is made of them.

    Raises:
        RefusedRequest: they can't be names of folders.
    """
    try:
        given = {key: cfg[key] for key in ("name", "run_id") if key in cfg}
    except OmegaConfBaseException:  # the run will report it
        return
    if problems := list(name_problems(given)):
        raise RefusedRequest(Cleaner.of(cfg).cleaned(problems))
