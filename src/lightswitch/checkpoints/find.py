"""The newest checkpoint of a run that can be read."""

from __future__ import annotations

import logging
from pathlib import Path

from lightswitch.batches.position import Position, saved_position
from lightswitch.checkpoints import directory, foreign
from lightswitch.checkpoints.reader import UnfitCheckpoint

log = logging.getLogger(__name__)


def newest(run_dir: Path, thoroughly: bool) -> tuple[Path, Position] | None:
    """The good checkpoint that stands furthest in training, whoever wrote it; None where there is none yet.

    Args:
        thoroughly: compare checksums, too. One process of a run does, and hands the path to the others.
    """
    patterns = ("checkpoints/*.ckpt", "checkpoints/*.ckpt.previous", "*.ckpt")
    found = [path for pattern in patterns for path in run_dir.glob(pattern) if not path.is_symlink()]
    standing = [(path, position) for path in found if (position := _good(path, thoroughly=False)) is not None]
    # of two at the same place, the one whose validation has run
    standing.sort(key=lambda found: (found[1].global_step, not found[1].validation_due), reverse=True)
    return next(((path, at) for path, at in standing if not thoroughly or _good(path, thoroughly=True)), None)


def position_of(path: Path, thoroughly: bool) -> Position | None:
    """Where a checkpoint stands in training; None for one that was written by something else.

    Raises:
        UnfitCheckpoint: it can't be read, or it isn't what was written.
    """
    found = None
    try:
        if foreign.is_foreign(path):
            if path.is_file():
                foreign.read(path)
            return None
        found = directory.damage(path) if thoroughly else None
        if found is None:
            return saved_position(directory.read_state(path))
    except Exception as error:  # torch raises many kinds for what is no checkpoint, or a part of one
        found = str(error).partition("\n")[0] or type(error).__name__
    raise UnfitCheckpoint(f"{path} can't be read as a checkpoint: {found}")


def _good(path: Path, thoroughly: bool) -> Position | None:
    try:
        return position_of(path, thoroughly)
    except UnfitCheckpoint as error:
        log.warning("%s; it is passed over", error)
        return None
