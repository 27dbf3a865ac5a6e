"""A checkpoint on disk: one directory, with the same content under every strategy and world size.

__<rank>_0.distcp, .metadata   torch.distributed.checkpoint: model.<name>, optimizer.<index>.<name>.<key>
trainer.pt                     all else, readable with weights_only=True
SHA256SUMS                     of every file above, as `sha256sum -c` reads them
.lightswitch                   empty: lightswitch has made the directory, and may remove it
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from lightswitch.checkpoints import disk, index, manifest, safe
from lightswitch.checkpoints.index import Index
from lightswitch.refused import Refused
from lightswitch.trees import make_tree, remove_tree

log = logging.getLogger(__name__)

STATE = "trainer.pt"


class UnwrittenCheckpoint(Refused, OSError):
    """A disk that is full, or gone."""


def write(path: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Written beside and renamed into place: ``path`` is whole at any moment, or it is not there.

    Collective over ``group``; None stands for one process. Tensors may be spread over the ranks (DTensor); of those
    that every rank holds, one writes each.

    Raises:
        UnwrittenCheckpoint: on every rank, when one of them could not write; what stood at ``path`` before still does,
            and nothing is left of what was written.
    """
    rank = dist.get_rank(group) if group else 0
    partial: Path = _together(group, lambda: make_tree(vacant(_beside(path, "partial"))) if rank == 0 else None)[0]
    try:
        sums = _together(group, lambda: _write_tensors(partial, tensors, group, rank))
        _together(group, lambda: _finish(path, partial, state, sums) if rank == 0 else None)
    except UnwrittenCheckpoint:
        if rank == 0:
            with contextlib.suppress(OSError, Refused):  # that it could not be written says all
                remove_tree(partial)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """All but the tensors of the checkpoint."""
    state = safe.load(path / STATE)
    if not isinstance(state, dict):
        raise manifest.Damaged(f"{STATE} holds no state of a run")
    return state


def read_index(path: Path, part: slice) -> Index:
    """Where the tensors are, once the files are found to be what was written.

    Args:
        part: of the tensors' files, those to compare with their checksums; the others are small.

    Raises:
        ValueError: something is damaged.
        OSError: a file can't be read.
    """
    sums = manifest.read(path)
    manifest.compare(path, sums, (index.INDEX, STATE))
    found = index.read(path)
    if unchecked := found.files - sums.keys():
        raise manifest.Damaged(f"{manifest.SUMS} does not name {min(unchecked)}")
    manifest.compare(path, sums, sorted(sums.keys() - {index.INDEX, STATE})[part])
    return found


def previous(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaces stands for the moment of the exchange."""
    return _beside(path, "previous")


def vacant(path: Path) -> Path:
    """``path``, once what we left there is removed; a name beside it where something stands that is not ours."""
    numbered = (path.with_name(f"{path.name}_{number}") for number in itertools.count(1))
    for candidate in itertools.chain([path], numbered):
        with contextlib.suppress(OSError, Refused):
            remove_tree(candidate)
        if not os.path.lexists(candidate):
            return candidate
    raise AssertionError("there is always another name")


def put(new: Path, path: Path) -> None:
    """Rename into place a directory, or a link. Of what stood there, a checkpoint of ours is removed."""
    before = previous(path)
    if os.path.lexists(path) and not (path.is_symlink() and new.is_symlink()):
        before = vacant(before)
        os.replace(path, before)
    os.replace(new, path)
    _to_disk(path.parent)
    remove(before)


def remove(path: Path) -> None:
    """Remove a checkpoint or a link to one; what is not ours stays, and the log says so."""
    try:
        if path.is_symlink():
            path.unlink()
        elif os.path.lexists(path):
            remove_tree(path)
    except (OSError, Refused) as error:
        log.warning("%s", error)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, rank: int
) -> dict[str, str]:
    """The checksums of the files that this rank wrote."""
    save(dict(tensors), storage_writer=disk.Writer(folder), process_group=group, no_dist=group is None)
    return {path.name: manifest.of_file(path) for path in folder.glob(f"__{rank}_*")}


def _finish(path: Path, partial: Path, state: dict[str, Any], sums: list[dict[str, str]]) -> None:
    with disk.true_cause(), (partial / STATE).open("wb") as file:
        torch.save(state, file)
    whole = {name: digest for written in sums for name, digest in written.items()}
    whole |= {name: manifest.of_file(partial / name) for name in (index.INDEX, STATE)}
    manifest.write(partial, whole)
    for name in (STATE, manifest.SUMS):
        _to_disk(partial / name)
    _to_disk(partial)
    put(partial, path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _together(group: dist.ProcessGroup | None, action: Callable[[], Any]) -> list[Any]:
    """The results of all ranks; where an action fails, every rank fails, and none waits for it."""
    result, failed = None, None
    try:
        result = action()
    except (Exception, disk.CheckpointException) as error:
        failed = disk.told(error, rank=dist.get_rank(group) if group else 0)
    if group is None:
        outcomes: list[Any] = [(result, failed)]
    else:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (result, failed), group=group)
    failures = [failure for _, failure in outcomes if failure]
    if failures:
        raise UnwrittenCheckpoint(f"the checkpoint could not be written: {failures[0]}")
    return [result for result, _ in outcomes]
