"""Files that an earlier start of a run has left in its directory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from lightswitch import regular_files


def read_yaml(path: Path) -> Any:
    """Read a YAML file; None if it does not exist or is damaged."""
    try:
        return regular_files.read_yaml(path)
    except (OSError, ValueError):
        return None


def checkpoint(name: str, run_dir: Path) -> Path:
    """Return the path of a checkpoint: `last` and `best` are those of the run itself, as in Lightning."""
    return run_dir / "checkpoints" / f"{name}.ckpt" if name in ("last", "best") else Path(name)


def set_aside(path: Path) -> None:
    """Rename a path to the first free name of `checkpoints_1`, `checkpoints_2`, …"""
    others = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(other for other in others if not other.exists()))
