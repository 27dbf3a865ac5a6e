"""A checkpoint on disk: one directory, complete or not there, that all ranks write together.

tensors_<rank>.bin, index.json   see format.py: model.<name>, optimizer.<index>.<name>.<key>, and
                                 trained.<name> if the model is an average of the trained weights
trainer.pt, SHA256SUMS           the rest, and the checksums of every file above
.lightswitch                     empty: marks a directory that lightswitch has made and may remove
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints import before, format
from lightswitch.checkpoints.format import INDEX, STATE, SUMS, Damaged, Index
from lightswitch.checkpoints.shards import Stored
from lightswitch.checkpoints.writing import Ranks, together
from lightswitch.errors import LostRank, Refused, UnwrittenCheckpoint, shown
from lightswitch.regular_files import is_link, is_own_tree, linked, make_tree, remove_tree, to_disk, write_link

log = logging.getLogger(__name__)

_LEFT = re.compile(r"(?P<name>.+\.ckpt)\.(?P<what>partial|previous)", re.DOTALL)


def write(path: Path, tensors: Mapping[str, Stored], state: dict[str, Any], ranks: Ranks | None) -> None:
    """Write a checkpoint beside ``path`` and rename it into place: ``path`` is complete or does not exist.

    Collective over ``ranks``; None means a single process. Tensors that all ranks hold whole are written once.

    Args:
        tensors: by name, of any shape; DTensors and Pieces are sharded over the ranks.
        state: the rest, in plain types (see `format.PlainTypes`).

    Raises:
        UnwrittenCheckpoint: on every rank, if one of them could not write; a previous checkpoint at ``path`` is
            unchanged, and the partial one is removed.
        LostRank: likewise, if one of them failed otherwise, or did not write in time.
    """
    group = ranks.writing if ranks else None
    rank = dist.get_rank(group) if group else 0
    beside = beside_of(path, "partial")
    together(group, "open it", lambda: str(make_empty(beside)) if rank == 0 else None)
    try:
        together(
            group,
            "write its shard",
            lambda: format.write_tensors(beside, rank, tensors),
            conclude=lambda written: _finish(path, beside, state, written),
        )
    except (UnwrittenCheckpoint, LostRank):
        if rank == 0:
            with contextlib.suppress(OSError, Refused):  # the error of the write is the one to report
                remove_tree(beside)
        raise


def make_empty(path: Path) -> Path:
    """Make an empty directory, and return its path, in place of what the engine has left there.

    Raises:
        OSError: it can't be made, or the user has put something else there.
    """
    if is_own_tree(path):
        remove_tree(path)
    return make_tree(path)


def _finish(path: Path, beside: Path, state: dict[str, Any], written: list[Any]) -> None:
    format.save(beside / STATE, state)
    format.load(beside / STATE, mapped=True)  # it can be read again
    format.write_index(beside, (described for _, _, described in written))
    sums = {name: digest for name, digest, _ in written}
    format.write_sums(beside, sums | {name: format.sum_of(beside / name) for name in (INDEX, STATE)})
    for name in (INDEX, STATE, SUMS, "."):
        to_disk(beside / name)
    put(beside, path)


def read_index(path: Path, part: slice) -> Index:
    """Compare a checkpoint's files with their checksums, and return the index of its tensors.

    Args:
        part: the slice of the tensor files, sorted by name, to compare; the small files are always compared.

    Raises:
        ValueError: a file is damaged.
        OSError: a file can't be read.
    """
    sums = format.read_sums(path)
    name = before.INDEX if is_of_before(path) else INDEX
    format.compare_sums(path, sums, (name, STATE))
    found = before.read_index(path) if is_of_before(path) else format.read_index(path)
    if unchecked := {shard.file for shards in found.shards.values() for shard in shards} - sums.keys():
        raise Damaged(f"{SUMS} has no checksum of {min(unchecked)}")
    format.compare_sums(path, sums, sorted(sums.keys() - {name, STATE})[part])
    return found


def is_of_before(path: Path) -> bool:
    """Return whether a checkpoint is of an earlier version of the engine."""
    return (path / before.INDEX).exists() and not (path / INDEX).exists()


def read_state(path: Path, shard: Callable[[str, Tensor], Any] = lambda name, whole: whole) -> dict[str, Any]:
    """Return a checkpoint's state without its tensors.

    Args:
        shard: see `format.restored`.

    Raises:
        ValueError: the file is damaged, or would run code.
    """
    found = format.load(linked(path) / STATE)
    if not isinstance(found, dict):
        raise Damaged(f"{STATE} does not contain the state of a run")
    state: dict[str, Any] = format.restored(found, shard)
    return state


def identity(path: Path) -> bytes | None:
    """Return the content of a checkpoint's SHA256SUMS, which identifies it; None if there is no checkpoint."""
    try:
        return (path / SUMS).read_bytes()
    except OSError:
        return None


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


def beside_of(path: Path, what: str) -> Path:
    """Return the temporary path of a checkpoint: "partial" while it is written, "previous" while it is replaced."""
    return path.with_name(f"{path.name}.{what}")


def put(new: Path, path: Path) -> None:
    """Rename a directory into place, and remove the engine's checkpoint that was there."""
    previous = beside_of(path, "previous")
    if os.path.lexists(path):
        remove(previous)
        os.replace(path, previous)
    os.replace(new, path)
    to_disk(path.parent)
    remove(previous)


def try_out(folder: Path) -> None:
    """Save, replace, link and remove a small checkpoint, so that a disk that can't hold one is found before training.

    Raises:
        Refused: it can't.
    """
    trial, alias = folder / "trial.ckpt", folder / "trial_link.ckpt"
    try:
        for _ in range(2):
            write(trial, {"trial": torch.zeros(1)}, {}, None)
        write_link(alias, trial.name)
        alias.unlink()
        left = [trial.rename(beside_of(trial, "partial")), beside_of(trial, "previous")]
        for path in filter(Path.exists, left):  # the second if its removal has failed
            remove_tree(path)
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
            aside = path if _LEFT.fullmatch(path.name) or not is_own_tree(path) else beside_of(path, "partial")
            if aside != path:
                path.rename(aside)
            remove_tree(aside)
    except (OSError, Refused) as error:
        log.warning("%s", error)
