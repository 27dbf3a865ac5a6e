"""Memory that a plan foretold for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightswitch import regular_files
from lightswitch.runs import saved

_FILE = "plan.json"
_MOST_BYTES = 1 << 63


def peak_bytes(run_dir: Path) -> int | None:
    """Return the bytes on a device that the plan in a run's directory gives for the strategy that it was run under.

    Where the plan compares precisions, in that of the run. None if there is no plan, or none of that strategy.
    """
    try:
        planned = regular_files.read_json(run_dir / _FILE)["strategies"]
        choices = _choices(run_dir)
        strategy, precision = (f"{group}={choices.get(group)}" for group in ("strategy", "precision"))
        found = [one["bytes"] for one in planned if list(one["words"]) in ([strategy], [strategy, precision])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found[0] if found and type(found[0]) is int and 0 <= found[0] < _MOST_BYTES else None


def _choices(run_dir: Path) -> Any:
    """Return the names of choices by their groups, as Hydra has written them down."""
    return saved.read_yaml(run_dir / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]
