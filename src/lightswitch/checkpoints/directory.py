"""A checkpoint on disk: one directory, with the same content under every strategy and world size.

__<rank>_0.distcp, .metadata   torch.distributed.checkpoint: model.<name>, optimizer.<index>.<name>.<key>
trainer.pt                     all else, readable with weights_only=True
SHA256SUMS                     of every file above, as `sha256sum -c` reads them
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from lightswitch.refused import Refused

STATE = "trainer.pt"
SUMS = "SHA256SUMS"
_TENSORS = ".metadata"


class UnwrittenCheckpoint(Refused, OSError):
    """A disk that is full, or gone."""


def write(path: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Written beside and renamed into place: ``path`` is whole at any moment, or it is not there.

    Collective over ``group``; None stands for one process. Tensors may be spread over the ranks (DTensor); of those
    that every rank holds, one writes each.

    Raises:
        UnwrittenCheckpoint: on every rank, when one of them could not write; what stood at ``path`` before still does.
    """
    rank = dist.get_rank(group) if group else 0
    partial = path.with_name(f"{path.name}.partial")
    _together(group, lambda: _empty(partial) if rank == 0 else None)
    sums = _together(group, lambda: _write_tensors(partial, tensors, group, rank))
    _together(group, lambda: _finish(path, partial, state, sums) if rank == 0 else None)


def read_state(path: Path) -> dict[str, Any]:
    """All but the tensors of the checkpoint."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def tensors(path: Path) -> dict[str, Tensor]:
    """By name, without values: shapes and dtypes."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
        for name, item in stored.items()
        if isinstance(item, TensorStorageMetadata)
    }


def damage(path: Path, group: dist.ProcessGroup | None = None) -> str | None:
    """What is wrong with the files of a checkpoint, in a few words; None if each is what was written.

    Collective over ``group``: each rank reads a part of the files, and all say the same.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    found = [_damage(path, slice(rank, None, ranks))]
    if group is not None:
        found *= ranks
        dist.all_gather_object(found, found[rank], group=group)
    return next(filter(None, found), None)


def damage_at_a_glance(path: Path) -> str | None:
    """The same without reading the tensors, for any process by itself."""
    return _damage(path, slice(0))


def previous(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaces stands for the moment of the exchange."""
    return path.with_name(f"{path.name}.previous")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _damage(path: Path, part: slice) -> str | None:
    """
    Args:
        part: of the tensors' files, those to compare with their checksums; the others are small.
    """
    try:
        lines = [line.split("  ") for line in (path / SUMS).read_text().splitlines()]
        sums = {name: digest for digest, name in lines}
    except (OSError, ValueError):
        return f"it has no {SUMS}, or a part of it"
    parts = sorted(file.name for file in path.glob("*.distcp"))
    for name in (_TENSORS, STATE, *parts):
        if name not in sums:
            return f"{SUMS} does not name {name}"
    for name in sums:
        if not (path / name).exists():
            return f"{name} is missing"
    for name in (_TENSORS, STATE, *parts[part]):
        if _sha256(path / name) != sums[name]:
            return f"{name} is not what was written"
    return None


def _empty(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, rank: int
) -> dict[str, str]:
    """The checksums of the files that this rank wrote."""
    writer = FileSystemWriter(folder)
    save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    return {path.name: _sha256(path) for path in folder.glob(f"__{rank}_*")}


def _finish(path: Path, partial: Path, state: dict[str, Any], sums: list[dict[str, str]]) -> None:
    torch.save(state, partial / STATE)
    whole = {name: digest for written in sums for name, digest in written.items()}
    whole |= {name: _sha256(partial / name) for name in (_TENSORS, STATE)}
    (partial / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(whole.items())))
    for name in (STATE, SUMS):
        _to_disk(partial / name)
    _to_disk(partial)
    remove(previous(path))
    if path.exists():
        os.replace(path, previous(path))
    os.replace(partial, path)
    _to_disk(path.parent)
    remove(previous(path))


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _together(group: dist.ProcessGroup | None, action: Callable[[], Any]) -> list[Any]:
    """The results of all ranks; where an action fails, every rank fails, and none waits for it."""
    result, failed = None, None
    try:
        result = action()
    except OSError as error:
        failed = f"rank {dist.get_rank(group) if group else 0}: {error}"
    except CheckpointException as error:  # of every rank, and it says whose it was
        failed = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
    if group is None:
        outcomes: list[Any] = [(result, failed)]
    else:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (result, failed), group=group)
    failures = [failure for _, failure in outcomes if failure]
    if failures:
        raise UnwrittenCheckpoint(f"the checkpoint could not be written: {failures[0]}")
    return [result for result, _ in outcomes]
