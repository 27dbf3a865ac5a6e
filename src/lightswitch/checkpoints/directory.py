"""A checkpoint on disk: one directory, with the same content under every strategy and world size.

tensors_<rank>.bin, index.json   see index.py: model.<name>, optimizer.<index>.<name>.<key>,
                                 trained.<name> if the model is an average of the trained weights,
                                 transient.<name> of non-persistent buffers that training changes
trainer.pt                       the rest, readable with weights_only=True
SHA256SUMS                       checksums of every file above, in the format of `sha256sum -c`
.lightswitch                     empty: marks a directory that lightswitch has made and may remove
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightswitch.checkpoints import before, index, manifest, safe
from lightswitch.checkpoints.index import Index
from lightswitch.checkpoints.ranks import CollectiveError, Ranks, describe_failure, first_line
from lightswitch.checkpoints.shards import Piece
from lightswitch.errors import LostRank, Refused, UnwrittenCheckpoint, shown
from lightswitch.regular_files import is_link, is_own_tree, linked, make_link, make_tree, remove_tree, to_disk

log = logging.getLogger(__name__)

STATE = "trainer.pt"
REPLACED = "a run in progress replaced or removed it during the read; try again"
_LEFT = re.compile(r"(?P<name>.+\.ckpt)\.(?P<what>partial|previous)(_\d+)?", re.DOTALL)


def write(path: Path, tensors: Mapping[str, Tensor | Piece], state: dict[str, Any], ranks: Ranks | None) -> None:
    """Write a checkpoint beside ``path`` and rename it into place: ``path`` is complete or does not exist.

    Collective over ``ranks``; None means a single process. Tensors that all ranks hold whole are written once.

    Args:
        tensors: by name, of any shape; DTensors and Pieces are sharded over the ranks.
        state: the rest, in plain types (see `safe.safe`).

    Raises:
        UnwrittenCheckpoint: on every rank, if one of them could not write; a previous checkpoint at ``path`` is
            unchanged, and the partial one is removed.
        LostRank: likewise, if one of them failed otherwise, or did not write in time.
    """
    rank, world_size = (ranks.writing.rank, ranks.writing.world_size) if ranks else (0, 1)
    partial = Path(
        *_together(
            ranks, "open it", lambda: str(make_tree(vacant(_beside(path, "partial")))) if rank == 0 else None, heard=[0]
        ),
    )
    try:
        everyone = range(world_size if rank == 0 else 0)
        written = _together(ranks, "write its shard", lambda: _write_tensors(partial, tensors, rank), everyone)
        _together(ranks, "finish it", lambda: _finish(path, partial, state, written) if rank == 0 else None)
    except (UnwrittenCheckpoint, LostRank):
        if rank == 0:
            with contextlib.suppress(OSError, Refused):  # the error of the write is the one to report
                remove_tree(partial)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state without its tensors.

    Raises:
        ValueError: the file is damaged, or would run code.
    """
    return safe.checked_state(safe.load(linked(path) / STATE), STATE)


def read_index(path: Path, part: slice) -> Index:
    """Compare a checkpoint's files with their checksums, and return the index of its tensors.

    Args:
        part: the slice of the tensor files, sorted by name, to compare; the small files are always compared.

    Raises:
        ValueError: a file is damaged.
        OSError: a file can't be read.
    """
    sums = manifest.read(path)
    is_of_before = before.INDEX in sums and index.INDEX not in sums
    name = before.INDEX if is_of_before else index.INDEX
    manifest.compare(path, sums, (name, STATE))
    found = before.read(path) if is_of_before else index.read(path)
    if unchecked := found.files - sums.keys():
        raise manifest.Damaged(f"{manifest.SUMS} has no checksum of {min(unchecked)}")
    manifest.compare(path, sums, sorted(sums.keys() - {name, STATE})[part])
    return found


def identity(path: Path) -> bytes | None:
    """Return the content of a checkpoint's SHA256SUMS, which identifies it; None if there is no checkpoint."""
    try:
        manifest.check_file(path, manifest.SUMS)
        return (path / manifest.SUMS).read_bytes()
    except (OSError, manifest.Damaged):
        return None


def replaced(path: Path, before: bytes | None) -> str | None:
    """Return a message if a run replaced or removed a checkpoint since it had the identity ``before``, else None."""
    now = identity(path)
    is_being_exchanged = now is None and os.path.lexists(previous(path))
    if now == before and not is_being_exchanged:
        return None
    return REPLACED


def finish_changes(folder: Path) -> None:
    """Clean up the checkpoints that a killed process was changing in a folder. No other process may write to it.

    Remove partially written checkpoints. Give a checkpoint that was being replaced its name back if the name is vacant,
    else remove it. Leave anything that the engine has not made.
    """
    for path in sorted(folder.glob("*.ckpt.*")):
        if not (left := _LEFT.fullmatch(path.name)) or not (is_link(path) or is_own_tree(path)):
            continue
        whole = folder / left["name"]
        if left["what"] == "previous" and path.is_dir() and not os.path.lexists(whole):
            path.rename(whole)
        else:
            remove(path)


def previous(path: Path) -> Path:
    """Return the temporary path of the old checkpoint while a new one replaces it at ``path``."""
    return _beside(path, "previous")


def vacant(path: Path) -> Path:
    """Return ``path`` after removing the engine's leftovers there, or a numbered name if something else is there."""
    numbered = (path.with_name(f"{path.name}_{number}") for number in itertools.count(1))
    for candidate in itertools.chain([path], numbered):
        with contextlib.suppress(OSError, Refused):
            if is_link(candidate):
                candidate.unlink()
            else:
                remove_tree(candidate)
        if not os.path.lexists(candidate):
            return candidate
    raise AssertionError("there is always another name")


def put(new: Path, path: Path) -> None:
    """Rename a directory or a link into place, and remove the engine's checkpoint that was there."""
    before = previous(path)
    if os.path.lexists(path) and not (is_link(path) and is_link(new)):
        before = vacant(before)
        os.replace(path, before)
    os.replace(new, path)
    to_disk(path.parent)
    remove(before)


def link(path: Path, target: str) -> None:
    """Make ``path`` a link to a path relative to its folder, in place of the link or the checkpoint that was there.

    Raises:
        OSError: it can't be written; what was there stays.
    """
    beside = vacant(_beside(path, "partial"))
    try:
        make_link(beside, target)
        put(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def try_out(folder: Path) -> None:
    """Save, replace, link and remove a small checkpoint, so that a disk that can't hold one is found before training.

    Raises:
        Refused: it can't.
    """
    trial, alias = folder / "trial.ckpt", folder / "trial_link.ckpt"
    try:
        for _ in range(2):
            write(trial, {"trial": torch.zeros(1)}, {}, None)
        link(alias, trial.name)
        alias.unlink()
        remove_tree(trial)
    except OSError as error:
        remove(trial)
        raise Refused(f"{shown(folder)}: {error}; choose a folder on another disk by hydra.run.dir=FOLDER") from error
    finally:
        with contextlib.suppress(OSError):  # of a run that goes on
            folder.rmdir()


def remove(path: Path) -> None:
    """Remove a checkpoint or a link to one. Anything that the engine has not made stays, with a warning.

    A checkpoint is renamed first, so that readers, and a start after a kill, find it complete or not at all.
    """
    try:
        if is_link(path):
            path.unlink()
        elif os.path.lexists(path):
            remove_tree(_set_aside(path))
    except (OSError, Refused) as error:
        log.warning("%s", error)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint of the engine to a name that `finish_changes` removes, and return its path."""
    if _LEFT.fullmatch(path.name) or not is_own_tree(path):
        return path
    aside = vacant(_beside(path, "partial"))
    path.rename(aside)
    return aside


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor | Piece], rank: int) -> tuple[str, str, dict[str, Any]]:
    try:
        return index.write_tensors(folder, rank, tensors)
    except Exception as error:  # the disk, or a tensor that has no bytes: the write may be retried, with all ranks
        raise CollectiveError(describe_failure(error, rank)) from error


def _finish(path: Path, partial: Path, state: dict[str, Any], written: list[Any]) -> None:
    try:
        with (partial / STATE).open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch's, in the course of the disk's, that the file is too short
        raise error.__context__ or error from None
    try:
        safe.load(partial / STATE, mapped=True)
    except safe.UnsafeFile as error:
        place = safe.first_unreadable(state)
        raise CollectiveError(f"{place} could not be read again" if place else str(error)) from error
    try:
        index.write(partial, (described for _, _, described in written))
    except manifest.Damaged as error:
        raise CollectiveError(f"the ranks' shards are not whole tensors: {error}") from error
    sums = {name: digest for name, digest, _ in written}
    manifest.write(partial, sums | {name: manifest.of_file(partial / name) for name in (index.INDEX, STATE)})
    for name in (index.INDEX, STATE, manifest.SUMS):
        to_disk(partial / name)
    to_disk(partial)
    put(partial, path)


def _together(ranks: Ranks | None, what: str, action: Callable[[], Any], heard: Iterable[int] = ()) -> list[Any]:
    """Run an action on every rank and return its results; if it fails on one rank, it fails on all without a hang.

    Args:
        what: the action, for the message that names a late rank: "write its shard".
        heard: the ranks whose results are returned.
    """
    try:
        if ranks is None:
            return [action()]
        ranks.writing.take(what, action)
    except OSError as error:
        message = (
            f"rank 0: {first_line(error)}" if ranks is None and not isinstance(error, CollectiveError) else str(error)
        )
        raise UnwrittenCheckpoint(f"the checkpoint could not be written: {message}") from error
    except LostRank as error:
        raise LostRank(f"the checkpoint could not be written: {error}") from error.__cause__
    return ranks.writing.results(heard)
