"""Memory that a plan foretold for a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightswitch.runs import saved

_FILE = "plan.json"


def peak_bytes(run_dir: Path) -> int | None:
    """Return the bytes on a device that the plan in a run's directory gives for the strategy that it was run under.

    None if there is no plan, or none of that strategy.
    """
    try:
        of_strategies = json.loads((run_dir / _FILE).read_text())["strategies"]
        found = [int(one["bytes"]) for one in of_strategies if list(one["words"]) == [f"strategy={_strategy(run_dir)}"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found[0] if found else None


def _strategy(run_dir: Path) -> Any:
    """Return the name of the strategy's choice, as Hydra has written it down."""
    return saved.read_yaml(run_dir / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]["strategy"]
