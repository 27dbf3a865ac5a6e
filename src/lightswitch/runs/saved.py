"""Files and config that an earlier start of a run has left in its directory, and changes since that config."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.config.confidential import masked
from lightswitch.errors import listed

_ABSENT = object()
_NO_HYPERPARAMETERS = (  # keys that identify the run or set what it logs, not what is trained
    *(
        "name",
        "run_id",
        "mode",
        "resume",
        "init_from",
        "init_names",
        "ckpt_path",
        "objective",
        "meet_timeout_seconds",
        "compare",
    ),
    *("cluster", "callbacks", "logger", "compile", "watch"),
)


_UNUSED = ("optimizer", "scheduler")  # groups that a record lacks if the module has its own


def read_yaml(path: Path) -> Any:
    """Read a YAML file; None if it does not exist or is damaged."""
    try:
        return regular_files.read_yaml(path)
    except (OSError, ValueError):
        return None


def has_trained(run_dir: Path) -> bool:
    """Return whether a directory has the record of a training, which an evaluation there leaves as it is."""
    config = read_yaml(run_dir / "config.yaml")
    return isinstance(config, dict) and config.get("mode") == "fit"


def checkpoint(name: str, run_dir: Path) -> Path:
    """Return the path of a checkpoint; `last` and `best` are those of the run itself, as in Lightning."""
    return run_dir / "checkpoints" / f"{name}.ckpt" if name in ("last", "best") else Path(name)


def set_aside(path: Path) -> None:
    """Rename a path to the first free numbered name."""
    path.rename(vacant(path))


def vacant(path: Path) -> Path:
    """Return the first free numbered name beside a path: for `checkpoints`, `checkpoints_1`, `checkpoints_2`, …"""
    others = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(1))
    return next(other for other in others if not other.exists())


def changes_since(run_dir: Path, cfg: DictConfig) -> str:
    """Return the changes since the earlier config, as in `optimizer.lr=0.001 (was 0.0003), seed=2 (was 1) and 3 more`.

    The text is empty if nothing differs, or the earlier config can't be read.
    """
    before = read_yaml(run_dir / "config.yaml")
    if not isinstance(before, dict) or not before:
        return ""
    now: Any = masked(OmegaConf.to_container(cfg))  # as the earlier one is written
    changes = [change for key in (*now, *(before.keys() - now.keys())) for change in _changes(key, before, now)]
    changes.sort(key=lambda change: change.lstrip("~").startswith("trainer."))  # execution settings come last
    return listed(changes)


def _changes(key: str, before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if key not in _NO_HYPERPARAMETERS and not (key in _UNUSED and key not in before):
        yield from _difference(key, before.get(key, _ABSENT), now.get(key, _ABSENT))


def _difference(path: str, before: Any, now: Any) -> Iterator[str]:
    """Yield the differences below one key, except interpolations, which follow the values that they refer to."""
    if isinstance(now, str) and "${" in now:
        return
    if path == "trainer.strategy" and (strategies := (_class(before), _class(now)))[0] != strategies[1]:
        yield f"{path}={strategies[1]} (was {strategies[0]})"  # the arguments of another class are not compared
    elif isinstance(before, dict) and isinstance(now, dict):
        for key in (*now, *(before.keys() - now.keys())):
            yield from _difference(f"{path}.{key}", before.get(key, _ABSENT), now.get(key, _ABSENT))
    elif now is _ABSENT:
        yield f"~{path} (was {_text(before)})"
    elif before is _ABSENT:
        yield f"{path}={_text(now)} (was not set)"
    elif str(before) != str(now) and "${" not in str(now):
        yield f"{path}={_text(now)} (was {_text(before)})"


def _class(strategy: Any) -> str:
    """Return the name of a strategy's class, or the string that the config has in place of a node."""
    return str(strategy.get("_target_") if isinstance(strategy, dict) else strategy).rpartition(".")[2]


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
