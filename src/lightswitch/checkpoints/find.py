"""The newest checkpoint of a run that can be read."""

from __future__ import annotations

import logging
from pathlib import Path

from lightswitch.batches.position import Position, read_position

log = logging.getLogger(__name__)


def newest(run_dir: Path) -> tuple[Path, Position] | None:
    """The checkpoint that stands furthest in training, whoever wrote it; None where there is none yet."""
    found = [(path, _position(path)) for path in [*run_dir.glob("checkpoints/*.ckpt"), *run_dir.glob("*.ckpt")]]
    good = [(path, position) for path, position in found if position is not None]
    # of two at the same place, the one whose validation has run
    return max(good, key=lambda found: (found[1].global_step, not found[1].validation_due), default=None)


def _position(path: Path) -> Position | None:
    try:
        position = read_position(path)
    except Exception as error:  # torch raises many kinds for a file that was cut short
        log.warning("%s can't be read and is passed over: %s", path, str(error).splitlines()[0])
        return None
    return position
