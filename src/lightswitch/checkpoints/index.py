"""The index of a checkpoint's tensors, in JSON, and the files with their values.

index.json      {"format": 1, "tensors": {NAME: {"dtype": "float32", "shape": [16, 2], "shards": [SHARD, …]}, …}}
                SHARD is {"file": "tensors_0.bin", "bytes": [BEGIN, END], "offset": [8, 0], "shape": [8, 2]}: a box of
                the whole tensor, and the bytes of the file that are its elements, in row-major order
tensors_0.bin   the values of the shards that rank 0 has written, one after the other, little-endian, without a header
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightswitch.checkpoints.manifest import Damaged, check_file, is_plain_name
from lightswitch.checkpoints.shards import Stored, boxes, local

INDEX = "index.json"
_FORMAT = 1
_LARGEST = 1 << 62  # of a size or an offset: torch's are 64 bits, and so is the product with an element's bytes


@dataclass(frozen=True)
class Shard:
    """Stored shard of a tensor: a box of the whole tensor, and the bytes of a file that hold it."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class Index:
    """Index of one checkpoint's tensors.

    Attributes:
        like: meta tensors by name, with the shapes and dtypes of the stored tensors.
        shards: the stored shards of each tensor, by name; together they are the whole tensor.
    """

    path: Path
    like: Mapping[str, Tensor]
    shards: Mapping[str, list[Shard]]

    @property
    def files(self) -> set[str]:
        """Names of the files that hold shards."""
        return {shard.file for shards in self.shards.values() for shard in shards}

    def bytes(self, shard: Shard) -> int:
        """Return the size of a stored shard in bytes."""
        return math.prod(shard.sizes) * self.like[shard.name].itemsize

    def read(self, shard: Shard, box: tuple[slice, ...]) -> Tensor:
        """Return a part of a stored shard, on the CPU. Only its rows are read: its slice of the first dimension.

        Raises:
            Damaged: the file is too short.
            OSError: the file can't be read.
        """
        rows, *others = box or (slice(0, 1),)  # a scalar is one row
        count, row_bytes = rows.stop - rows.start, self.bytes(shard) // (shard.sizes or (1,))[0]
        values = torch.empty(count * row_bytes, dtype=torch.uint8)
        with (self.path / shard.file).open("rb") as file:
            file.seek(shard.begin + rows.start * row_bytes)
            if file.readinto(values.numpy().data) != len(values):
                raise Damaged(f"{shard.file} is shorter than {INDEX} says")
        whole = values.view(self.like[shard.name].dtype).view((count, *shard.sizes[1:]) if box else ())
        return whole[(slice(None), *others)] if box else whole


def write_tensors(folder: Path, rank: int, tensors: Mapping[str, Stored]) -> tuple[str, str, dict[str, Any]]:
    """Write a rank's shards of tensors, on the CPU, and return the file's name, its SHA-256 and its part of the index.

    Raises:
        OSError: the disk is full, or fails.
    """
    name, digest = f"tensors_{rank}.bin", hashlib.sha256()
    described: dict[str, Any] = {}
    with (folder / name).open("wb") as file:
        for tensor_name, tensor in tensors.items():
            shards = []
            for offsets, values in boxes(tensor):
                data = values.contiguous().view(-1).view(torch.uint8).numpy().data
                place = [file.tell(), file.tell() + len(data)]
                file.write(data)
                digest.update(data)
                shards.append({"file": name, "bytes": place, "offset": offsets, "shape": values.shape})
            dtype = str(local(tensor).dtype).removeprefix("torch.")
            described[tensor_name] = {"dtype": dtype, "shape": tensor.shape, "shards": shards}
        file.flush()
        os.fsync(file.fileno())
    return name, digest.hexdigest(), described


def write(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """Write the index from the parts of all ranks; of a shard that several have written, take the first.

    Raises:
        Damaged: the shards are not whole tensors.
    """
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, described in part.items():
            whole = tensors.setdefault(name, {**described, "shards": {}})
            for shard in described["shards"]:
                whole["shards"].setdefault(tuple(shard["offset"]), shard)
    listed = {name: {**whole, "shards": [*whole["shards"].values()]} for name, whole in tensors.items()}
    found = {"format": _FORMAT, "tensors": listed}
    check_shards(_parsed(folder, found), INDEX)
    (folder / INDEX).write_text(json.dumps(found, separators=(",", ":")))


def read(path: Path) -> Index:
    """Return the index in a checkpoint's directory.

    Raises:
        Damaged: with the reason. No memory is allocated for the sizes in the index before they are compared with the
            sizes of the files.
    """
    check_file(path, INDEX)
    try:
        index = _parsed(path, json.loads((path / INDEX).read_bytes()))
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"{INDEX} can't be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:  # other or nested too deep
        raise Damaged(f"{INDEX} is not an index of tensors") from error
    check_shards(index, INDEX)
    check_files(index, INDEX)
    return index


def _parsed(path: Path, found: Any) -> Index:
    if found["format"] != _FORMAT:
        raise Damaged(f"{INDEX} has format {found['format']}, expected {_FORMAT}; use the lightswitch that wrote it")
    like, shards = {}, {}
    for name, described in found["tensors"].items():
        like[name] = meta(described["shape"], getattr(torch, described["dtype"]))
        shards[name] = [
            Shard(name, sizes_of(one["offset"]), sizes_of(one["shape"]), one["file"], *sizes_of(one["bytes"]))
            for one in described["shards"]
        ]
    return Index(path, like, shards)


def meta(shape: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor without values."""
    return torch.empty(sizes_of(shape), dtype=dtype, device="meta")


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return a list of sizes as a tuple.

    Raises:
        TypeError: an entry is not an integer, or out of range.
    """
    if not all(type(size) is int and 0 <= size < _LARGEST for size in value):
        raise TypeError(f"not a list of sizes: {value}")
    return tuple(value)


def check_shards(index: Index, source: str) -> None:
    """Check that the shards are within their tensors and make up all elements.

    Raises:
        Damaged: they are not; the message names the file of the index, ``source``.
    """
    for name, like in index.like.items():
        elements = 0
        for shard in index.shards[name]:
            sides = [*zip(shard.offsets, shard.sizes, like.shape, strict=False)]
            if not len(shard.offsets) == len(shard.sizes) == like.dim() or any(a + b > c for a, b, c in sides):
                raise Damaged(f"{source} has a shard outside of {name}")
            elements += math.prod(shard.sizes)
        if elements != like.numel():
            raise Damaged(f"{source} has {elements} of the {like.numel()} elements of {name}")


def check_files(index: Index, source: str) -> None:
    """Check that each shard is within a file of the checkpoint, so that the tensors take no more memory than the files.

    Raises:
        Damaged: one is not.
    """
    stored = [shard for shards in index.shards.values() for shard in shards]
    if outside := next((shard for shard in stored if not is_plain_name(shard.file)), None):
        raise Damaged(f"{source} names a file outside of the checkpoint: {outside.file}")
    for name in sorted(index.files):
        check_file(index.path, name)
    file_bytes = {name: (index.path / name).stat().st_size for name in index.files}
    for shard in stored:
        if shard.begin + index.bytes(shard) > shard.end or shard.end > file_bytes[shard.file]:
            raise Damaged(f"{shard.file} is shorter than {source} says")
    if sum(shard.end - shard.begin for shard in stored) > sum(file_bytes.values()):
        raise Damaged(f"{source} refers to a part of a file for several shards")
