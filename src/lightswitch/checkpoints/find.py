"""The newest checkpoint of a run that can be read."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from lightswitch.batches.position import Position, saved_position
from lightswitch.checkpoints import directory, foreign
from lightswitch.checkpoints.reader import Reader, unreadable, why
from lightswitch.errors import UnfitCheckpoint, shown

log = logging.getLogger(__name__)

_WRITTEN = re.compile(r".+\.ckpt(\.previous(_\d+)?)?", re.DOTALL)
_ASKED_FOR = re.compile(r".+\.ckpt", re.DOTALL)  # written by Lightning when a scheduler asks
_NO_TENSORS = slice(0)


def newest(run_dir: Path) -> tuple[Path, Position] | None:
    """Return the checkpoint of a run that is furthest in training, and its position; None where there is none yet.

    Whether its tensors are undamaged is found where they are read, by all ranks together.

    Raises:
        UnfitCheckpoint: there are checkpoints, and none of them can be read.
    """
    readable, damaged = _found(run_dir)
    if damaged and not readable:
        raise _all_damaged(damaged)
    _warn_of(damaged)
    return readable[0] if readable else None


def best_or_last(run_dir: Path) -> Path | None:
    """Return the checkpoint that a run stands for: its best, else its last; None where it has neither yet."""
    named = (run_dir / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    return next((path for path in named if path.exists()), None)


def up_to(path: Path, run_dir: Path) -> list[Path]:
    """Return a checkpoint and, if it is the run's own, those before it in training: candidates to go on from."""
    readable = [own for own, _ in _found(run_dir)[0]]
    return readable[readable.index(path) :] if path in readable else [path]


def first_whole(candidates: list[Path], group: dist.ProcessGroup | None) -> Reader:
    """Return a reader of the first checkpoint that is undamaged. Collective.

    Args:
        candidates: in the order of preference.
        group: of the ranks that read together; None for one process.

    Raises:
        UnfitCheckpoint: on every rank, when all of them are damaged.
    """
    damaged: list[UnfitCheckpoint] = []
    for path in candidates:
        try:
            reader = Reader(path, group)
        except UnfitCheckpoint as error:
            damaged.append(error)
            continue
        _warn_of(damaged, instead=path)
        return reader
    raise _all_damaged(damaged)


def position_of(path: Path) -> Position | None:
    """Return a checkpoint's position in training; None for one that was not written by this engine.

    Raises:
        UnfitCheckpoint: it can't be read, as far as can be told without reading its tensors.
    """
    before = directory.identity(path)
    try:
        if foreign.is_foreign(path):
            if path.is_file() and not foreign.is_hub(path):
                foreign.read(path)
            return None
        directory.read_index(path, _NO_TENSORS)
        return saved_position(directory.read_state(path))
    except Exception as error:  # torch raises many kinds for what is no checkpoint, or a part of one
        raise unreadable(path, directory.replaced(path, before) or why(error)) from error


def _found(run_dir: Path) -> tuple[list[tuple[Path, Position]], list[UnfitCheckpoint]]:
    """Return the checkpoints of a run that can be read, the furthest first, and the errors of the others."""
    readable, damaged = [], []
    for path in [*_named(run_dir / "checkpoints", _WRITTEN), *_named(run_dir, _ASKED_FOR)]:
        try:
            if (position := position_of(path)) is not None:
                readable.append((path, position))
        except UnfitCheckpoint as error:
            damaged.append(error)
    readable.sort(key=_distance, reverse=True)
    return readable, damaged


def _distance(found: tuple[Path, Position]) -> tuple[int, bool, bool, str]:
    """Return how far a checkpoint is: of two at the same step, the one after whose validation and whose epoch's end;
    then the one that is named by its step."""
    path, position = found
    return position.global_step, not position.validation_due, not position.epoch_end_due, path.name


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the directories in a folder whose names fit, as checkpoints of the engine are; not files nor links.

    Raises:
        UnfitCheckpoint: it can't be listed. A run that has checkpoints must not start anew for that.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / entry.name
                for entry in entries
                if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnfitCheckpoint(f"{shown(folder)} can't be listed: {error.strerror}") from error


@rank_zero_only
def _warn_of(damaged: list[UnfitCheckpoint], instead: Path | None = None) -> None:
    for error in damaged:
        log.warning("%s; it is passed over", error)
    if damaged and instead:
        log.info("resumes    %s", shown(instead))


def _all_damaged(damaged: list[UnfitCheckpoint]) -> UnfitCheckpoint:
    told = "; ".join(map(str, damaged))
    return UnfitCheckpoint(f"{told}; start anew with resume=never, or go on from another with resume=PATH")
