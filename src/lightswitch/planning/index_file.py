"""Bytes of a checkpoint's index, `.metadata`: torch's own records, pickled as its writer does."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Shape = tuple[int, ...]
_FILE = "__0_0.distcp"
_FOLDER, _SAVE = "/" + 79 * "-", 36 * "-"  # a path, which is not known, and a UUID
_DIGITS = 9  # of a name that stands for a tensor's


@dataclass(frozen=True)
class Entry:
    """Entry of a tensor in the index, of any name.

    Attributes:
        bytes: beside its name.
        names: how often its name is written.
    """

    bytes: int
    names: int

    def bytes_as(self, name: str) -> int:
        """Return the bytes for a tensor of this name."""
        return self.bytes + self.names * len(name.encode())


def empty_bytes() -> int:
    """Return the bytes of an index of no tensors."""
    return len(pickle.dumps(Metadata({}, {}, {}, StorageMeta(_FOLDER, _SAVE))))


def entry(shape: Shape, dtype: torch.dtype, parts: Mapping[Shape, Shape], part_bytes: int, world_size: int) -> Entry:
    """Return what the index says of a tensor.

    Args:
        parts: that are written: their shapes, by where they begin in the whole tensor.
        part_bytes: of one of them in its file.
    """
    names = [f"{number:0{_DIGITS}}" for number in range(_names(len(parts), world_size))]
    described, stored = _described(shape, dtype, {shape: shape}, [""]), _stored({shape: shape}, part_bytes, [""])
    # what a pickle repeats of its first 256 objects takes fewer bytes, and in an index those are all of descriptions
    before = [*described, *([] for _ in range(256)), *stored]
    own = [*_described(shape, dtype, parts, names), *_stored(parts, part_bytes, names)]
    return Entry(len(pickle.dumps([*before, *own])) - len(pickle.dumps(before)) - _DIGITS * len(names), len(names))


def _names(parts: int, world_size: int) -> int:
    """Return how often a tensor's name is written: once for each object that a rank has sent, of which one has it."""
    if world_size == 1:
        return 1
    return 2 if parts == 1 else 2 + parts


def _described(shape: Shape, dtype: torch.dtype, parts: Mapping[Shape, Shape], names: Sequence[str]) -> list[Any]:
    """Return a tensor's keys and values in the dicts of what there is, and of what was planned."""
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in parts.items()]
    planned = names[1] if len(names) > 2 else names[0]
    return [names[0], TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks), planned, (planned,)]


def _stored(parts: Mapping[Shape, Shape], part_bytes: int, names: Sequence[str]) -> list[Any]:
    """Return a tensor's keys and values in the dict of where it lies."""
    of_parts = names[-len(parts) :] if len(names) > 1 else len(parts) * [names[0]]
    return [
        record
        for number, (name, offset) in enumerate(zip(of_parts, parts, strict=True))
        for record in (MetadataIndex(name, offset, number), _StorageInfo(_FILE, 100 * part_bytes, part_bytes))
    ]
