"""Mark of a finished run in its directory, and the run's final metrics. Imports no torch."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.context import RunContext
from lightswitch.errors import Refused
from lightswitch.runs import claim, saved
from lightswitch.runs.saved import set_aside

log = logging.getLogger(__name__)

_FILE = "ended.json"
RESULTS = "results.json"


@dataclass(frozen=True)
class Mark:
    """End of a run, as written to ended.json.

    Args:
        step: number of optimizer steps that were trained.
        limits: the Trainer's `max_steps`, `max_epochs` and `max_time` when the run ended; `patience` if that ended it.
        go_on: command that continues the run under higher limits; null if there is no checkpoint.
    """

    step: int
    limits: dict[str, Any]
    go_on: str | None


def before(cfg: DictConfig, run: RunContext) -> bool:
    """Return whether fit and test have already ended under limits at least as high as this start's.

    All processes of the run get the same result.
    """
    if cfg.mode != "fit" or cfg.resume != "auto":
        return False
    ended = _read(run)
    if ended is None or _exceed(_limits(cfg) | {"patience": _patience(cfg)}, ended.limits):
        return False
    if run.is_first:
        changed = saved.changes_since(run.run_dir, cfg)
        otherwise = f", and {changed} has no effect" if changed else ""
        log.info("finished   fit and test have ended at step %d%s; resume=never starts anew", ended.step, otherwise)
        if ended.go_on:
            log.info("go on      %s", ended.go_on)
        with suppress(Refused):  # removes the lock of a start that was killed after it had written the mark
            claim.take(cfg, run)
    return True


def keep(cfg: DictConfig, run_dir: Path, step: int, go_on: str | None, stopped_early: bool = False) -> None:
    """Write the mark of a finished run, with its limits.

    Args:
        go_on: command that continues the run under higher limits.
        stopped_early: whether a callback has ended it, so that more patience is a higher limit, too.
    """
    limits = _limits(cfg) | ({"patience": _patience(cfg)} if stopped_early else {})
    regular_files.write_text(run_dir / _FILE, json.dumps(asdict(Mark(step, limits, go_on)), indent=2) + "\n")


def last_step(run_dir: Path) -> int:
    """Return the step at which a run ended; 0 if it has not ended, or its mark is damaged."""
    try:
        ended = regular_files.read_json(run_dir / _FILE)
    except (OSError, ValueError):
        return 0
    return int(ended["step"]) if _is_whole(ended) else 0


def is_marked(run_dir: Path) -> bool:
    """Return whether fit and test of a run have ended, under the limits of that run."""
    return (run_dir / _FILE).is_file()


def forget(run_dir: Path) -> None:
    """Remove the mark, because the run continues."""
    if (run_dir / _FILE).is_dir():  # a directory is no mark, and may hold files of the user
        set_aside(run_dir / _FILE)
    (run_dir / _FILE).unlink(missing_ok=True)


def _read(run: RunContext) -> Mark | None:
    """Return the mark; None if there is none, a faster rank has just removed it, or it is damaged."""
    file = run.run_dir / _FILE
    try:
        ended = regular_files.read_json(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # empty, truncated, not text, or not a file
        ended = None
    if not _is_whole(ended):
        if run.is_first:
            log.warning("%s can't be read; the run uses its checkpoints instead", os.path.relpath(file))
        return None
    return Mark(**{name: ended[name] for name in Mark.__dataclass_fields__})


def _is_whole(ended: Any) -> bool:
    match ended:
        case {"step": int(), "limits": {"max_time": _, **counts}, "go_on": str() | None}:
            of_trainer = [counts.get(name, "") for name in ("max_steps", "max_epochs")]
            return all(isinstance(count, int | None) for count in (*of_trainer, counts.get("patience")))
    return False


def _limits(cfg: DictConfig) -> dict[str, Any]:
    limits: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    return {name: limits.get(name) for name in ("max_steps", "max_epochs", "max_time")}


def _exceed(limits: dict[str, Any], others: dict[str, Any]) -> bool:
    if limits["max_time"] != others["max_time"]:
        return True
    counts = ("max_steps", "max_epochs", "patience")
    return any(_count(limits[name]) > _count(others[name]) for name in counts if name in others)


def _patience(cfg: DictConfig) -> int | None:
    """Return the least patience of the callbacks that stop a run early; None if there is none."""
    nodes = [node for node in (cfg.get("callbacks") or {}).values() if isinstance(node, DictConfig)]
    return min((node.patience for node in nodes if isinstance(node.get("patience"), int)), default=None)


def _count(limit: int | None) -> float:
    return math.inf if limit is None or limit == -1 else limit


def write_results(run_dir: Path, metrics: dict[str, float]) -> None:
    """Write the metrics to results.json."""
    regular_files.write_text(run_dir / RESULTS, json.dumps(metrics, indent=2) + "\n")


def read_results(run_dir: Path) -> dict[str, float]:
    """Return the metrics in results.json; empty if the run has not ended, or the file is damaged."""
    try:
        return dict(regular_files.read_json(run_dir / RESULTS))
    except (OSError, ValueError, TypeError):
        return {}
