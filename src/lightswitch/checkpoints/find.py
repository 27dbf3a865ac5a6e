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
from lightswitch.checkpoints.reader import Reader, shown, unreadable, why
from lightswitch.errors import UnfitCheckpoint

log = logging.getLogger(__name__)

_WRITTEN = re.compile(r".+\.ckpt(\.previous(_\d+)?)?", re.DOTALL)
_ASKED_FOR = re.compile(r".+\.ckpt", re.DOTALL)  # by a scheduler, of Lightning
_NO_TENSORS = slice(0)


def newest(run_dir: Path) -> tuple[Path, Position] | None:
    """The checkpoint that stands furthest in training, whoever wrote it; None where there is none yet.

    Whether its tensors are what was written is found where they are read, by all ranks together.

    Raises:
        UnfitCheckpoint: there are some, and none of them can be read.
    """
    standing, harmed = _found(run_dir)
    if harmed and not standing:
        raise _none_is_whole(harmed)
    _tell(harmed)
    return standing[0] if standing else None


def up_to(path: Path, run_dir: Path) -> list[Path]:
    """A checkpoint and, if it is the run's own, those that stand before it: what a run may go on from."""
    standing = [own for own, _ in _found(run_dir)[0]]
    return standing[standing.index(path) :] if path in standing else [path]


def first_whole(candidates: list[Path], group: dist.ProcessGroup | None) -> Reader:
    """Of the first one that is what was written. Collective.

    Raises:
        UnfitCheckpoint: on every rank, when none of them is.
    """
    harmed: list[UnfitCheckpoint] = []
    for path in candidates:
        try:
            reader = Reader(path, group)
        except UnfitCheckpoint as error:
            harmed.append(error)
            continue
        _tell(harmed, instead=path)
        return reader
    raise _none_is_whole(harmed)


def position_of(path: Path) -> Position | None:
    """Where a checkpoint stands in training; None for one that was written by something else.

    Raises:
        UnfitCheckpoint: it can't be read, as far as can be told without reading its tensors.
    """
    try:
        if foreign.is_foreign(path):
            if path.is_file():
                foreign.read(path)
            return None
        directory.read_index(path, _NO_TENSORS)
        return saved_position(directory.read_state(path))
    except Exception as error:  # torch raises many kinds for what is no checkpoint, or a part of one
        raise unreadable(path, why(error)) from error


def _found(run_dir: Path) -> tuple[list[tuple[Path, Position]], list[UnfitCheckpoint]]:
    """Those that can be read, the furthest in training first, and what is wrong with the others."""
    standing, harmed = [], []
    for path in [*_named(run_dir / "checkpoints", _WRITTEN), *_named(run_dir, _ASKED_FOR)]:
        try:
            if (position := position_of(path)) is not None:
                standing.append((path, position))
        except UnfitCheckpoint as error:
            harmed.append(error)
    # of two at the same place, the one whose validation has run; then the one that is named by its step
    standing.sort(key=lambda found: (found[1].global_step, not found[1].validation_due, found[0].name), reverse=True)
    return standing, harmed


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Directories in it, as our checkpoints are; files and links are something else's.

    Raises:
        UnfitCheckpoint: it can't be listed. A run that has checkpoints is not to start anew for that.
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
def _tell(harmed: list[UnfitCheckpoint], instead: Path | None = None) -> None:
    for error in harmed:
        log.warning("%s; it is passed over", error)
    if harmed and instead:
        log.info("resumes    %s", shown(instead))


def _none_is_whole(harmed: list[UnfitCheckpoint]) -> UnfitCheckpoint:
    told = "; ".join(map(str, harmed))
    return UnfitCheckpoint(f"{told}; start anew with resume=never, or go on from another with resume=PATH")
