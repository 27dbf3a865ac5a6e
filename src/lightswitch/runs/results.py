"""The metrics that a run ended with, kept in its directory."""

from __future__ import annotations

import json
from pathlib import Path

from lightswitch import regular_files

FILE = "results.json"


def write(run_dir: Path, metrics: dict[str, float]) -> None:
    """Write the metrics to results.json."""
    regular_files.write_text(run_dir / FILE, json.dumps(metrics, indent=2) + "\n")


def read(run_dir: Path) -> dict[str, float]:
    """Read the metrics; none if the run has not ended, or the file is damaged."""
    try:
        return dict(regular_files.read_json(run_dir / FILE))
    except (OSError, ValueError, TypeError):
        return {}
