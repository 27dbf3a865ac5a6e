"""The index of a checkpoint's tensors (torch.distributed.checkpoint's `.metadata`), read as data.

torch's reader unpickles it, and so calls whatever the file names. Here every name in the file must be in a list, and
becomes a record without behaviour; all values taken from the records are checked.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightswitch.checkpoints import safe
from lightswitch.checkpoints.manifest import Damaged, check_file, is_plain_name

INDEX = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR, _BYTES = f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.BytesStorageMetadata"
_RECORDS = {
    *(_TENSOR, _BYTES, f"{_METADATA}.Metadata", f"{_METADATA}.MetadataIndex", f"{_METADATA}.ChunkStorageMetadata"),
    *(f"{_METADATA}.TensorProperties", f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_METADATA}.StorageMeta"),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout"),
    "builtins.getattr",  # in pickled enum members of Python 3.11.0 to 3.11.3
    *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}
_PACKED = re.compile(r"torch\.(q|bit|u?int[1-7]$)")  # dtypes of sub-byte elements, or that need a scale
_BUILTINS: dict[str, Any] = {"torch.Size": tuple, "collections.OrderedDict": dict}


@dataclass(frozen=True)
class Index:
    """Index of one checkpoint's tensors, whose chunks are known to be within files of its directory."""

    path: Path
    metadata: Metadata
    files: frozenset[str]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name on the meta device: shapes and dtypes without values."""
        return {
            name: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
            for name, item in self.metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        }

    def chunk(self, key: MetadataIndex) -> Tensor:
        """Return a stored chunk of a tensor, on the CPU.

        Raises:
            Damaged: the file's content differs from the index.
            OSError: the file can't be read.
        """
        found = self.metadata.storage_data[key]
        with (self.path / found.relative_path).open("rb") as file:
            part = _Reader(self)._slice_file(file, found)
            chunk = torch.load(part, map_location="cpu", weights_only=True)
        if not isinstance(chunk, Tensor) or (chunk.shape, chunk.dtype) != (self.sizes(key), self.dtype(key)):
            raise Damaged(f"{found.relative_path} does not contain {key.fqn} as {INDEX} describes it")
        return chunk

    def sizes(self, key: MetadataIndex) -> torch.Size:
        """Return the shape of a stored chunk."""
        return self._sizes[key]

    @cached_property
    def _sizes(self) -> dict[MetadataIndex, torch.Size]:
        described = self.metadata.state_dict_metadata.items()
        tensors = ((name, item) for name, item in described if isinstance(item, TensorStorageMetadata))
        return {MetadataIndex(name, chunk.offsets): chunk.sizes for name, item in tensors for chunk in item.chunks}

    def dtype(self, key: MetadataIndex) -> torch.dtype:
        """Return the dtype of a stored chunk."""
        return self._described(key).properties.dtype

    def bytes(self, key: MetadataIndex) -> int:
        """Return the size of a stored chunk in bytes."""
        return math.prod(self.sizes(key)) * self.dtype(key).itemsize

    def place(self, key: MetadataIndex) -> tuple[str, int]:
        """Return the file of a stored chunk, and its offset in that file."""
        found = self.metadata.storage_data[key]
        return found.relative_path, found.offset

    def _described(self, key: MetadataIndex) -> TensorStorageMetadata:
        found = self.metadata.state_dict_metadata[key.fqn]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def reader(self) -> FileSystemReader:
        """Return a reader for torch's `load` that uses this index instead of reading the file."""
        return _Reader(self)


def read(path: Path) -> Index:
    """Return the index in a checkpoint's directory, restricted to tensors.

    Raises:
        Damaged: with the reason. No memory is allocated for the sizes in the index before they are compared with the
            sizes of the files.
    """
    _file_bytes(path, INDEX)
    top = _unpickled(path / INDEX)
    stored = {_key(key): _info(info) for key, info in _mapping(_field(top, "storage_data")).items()}
    file_bytes = {name: _file_bytes(path, name) for name in sorted({info.relative_path for info in stored.values()})}
    described = _mapping(_field(top, "state_dict_metadata"))
    of_tensors = [info for key, info in stored.items() if _kind(described.get(key.fqn)) != _BYTES]
    if sum(info.length for info in of_tensors) > sum(file_bytes.values()):  # before each of them is looked at
        ends = {
            info.relative_path: info.offset + info.length for info in sorted(of_tensors, key=lambda one: one.offset)
        }
        if short := next((name for name, end in ends.items() if end > file_bytes[name]), None):
            raise Damaged(f"{short} is shorter than {INDEX} says")
        raise Damaged(f"{INDEX} refers to a part of a file for several chunks")
    tensors = {name: _tensor(name, item) for name, item in described.items() if _kind(item) != _BYTES}
    used = {key: stored[key] for key in _compared(tensors, stored, file_bytes)}
    files = frozenset(info.relative_path for info in used.values())
    return Index(path, Metadata(dict(tensors), storage_data=used), files)


class _Reader(FileSystemReader):
    """FileSystemReader with an index that was already read."""

    def __init__(self, index: Index) -> None:
        super().__init__(index.path)
        self._metadata = index.metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        """Return the part of a file that holds a tensor, after checking that it does not decompress to more bytes."""
        part = super()._slice_file(file, sinfo)
        safe.check_zip(_FromItsEnd(part, sinfo.length), sinfo.length, sinfo.relative_path)
        part.seek(0)
        return part

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _FromItsEnd:
    """View of a file that supports seeking from its end: torch's view uses the wrong sign for the offset."""

    def __init__(self, part: Any, length: int) -> None:
        self.part, self.length = part, length
        self.read, self.tell = part.read, part.tell

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> Any:
        if whence == os.SEEK_END:
            offset, whence = self.length + offset, os.SEEK_SET
        return self.part.seek(offset, whence)


class _Record:
    """Record of an object in the index: its constructor arguments and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that calls only record classes, made for each unpickler so that no file can change those of another."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        found = self._classes.get(f"{module}.{name}") or _BUILTINS.get(f"{module}.{name}")
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise Damaged(f"{INDEX} names {module}.{name}, which would run code")
        return found


def _unpickled(file: Path) -> Any:
    try:
        with file.open("rb") as opened:
            return _Unpickler(opened).load()
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"{INDEX} can't be read: {error.strerror}") from error
    except Exception as error:  # pickle raises many kinds of errors for a file that is not a pickle, or truncated
        raise Damaged(f"{INDEX} is not an index of tensors") from error


def _kind(record: Any) -> str:
    return type(record).__name__ if isinstance(record, _Record) else ""


def _field(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or not isinstance(record.state, dict):
        raise Damaged(f"{INDEX} is not an index of tensors")
    return record.state.get(name)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise Damaged(f"{INDEX} is not an index of tensors")
    return value


def _sizes(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or any(type(size) is not int or not 0 <= size < 1 << 62 for size in value):
        raise Damaged(f"{INDEX} has a damaged shape")
    return torch.Size(value)


def _key(record: Any) -> MetadataIndex:
    name, offset = _field(record, "fqn"), _field(record, "offset")
    if not isinstance(name, str):
        raise Damaged(f"{INDEX} has a tensor without a name")
    return MetadataIndex(name, None if offset is None else _sizes(offset))


def _info(record: Any) -> _StorageInfo:
    file, offset, length = (_field(record, name) for name in ("relative_path", "offset", "length"))
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise Damaged(f"{INDEX} has a tensor chunk without an offset")
    if not is_plain_name(file):
        raise Damaged(f"{INDEX} names a file outside of the checkpoint: {file}")
    if _field(record, "transform_descriptors"):
        raise Damaged(f"{INDEX} names a compression, which lightswitch and Lightning never use")
    return _StorageInfo(file, offset, length)


def _tensor(name: Any, record: Any) -> TensorStorageMetadata:
    properties = getattr(_field(record, "properties"), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    chunks = _field(record, "chunks")
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        raise Damaged(f"{INDEX} is not an index of tensors")
    if _PACKED.match(str(dtype)):
        raise Damaged(f"{INDEX} has {name} as {dtype}, which lightswitch and Lightning never save")
    parts = [ChunkStorageMetadata(_sizes(_field(c, "offsets")), _sizes(_field(c, "sizes"))) for c in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _sizes(_field(record, "size")), parts)


def _file_bytes(path: Path, name: str) -> int:
    check_file(path, name)
    return (path / name).stat().st_size


def _compared(
    tensors: Mapping[str, TensorStorageMetadata],
    stored: Mapping[MetadataIndex, _StorageInfo],
    file_bytes: Mapping[str, int],
) -> Iterator[MetadataIndex]:
    """Yield the keys of all chunks, after checking that each is within its file and that they make up each tensor."""
    claimed_bytes = 0
    for name, tensor in tensors.items():
        numbers = 0
        for chunk in tensor.chunks:
            key, count = MetadataIndex(name, chunk.offsets), math.prod(chunk.sizes)
            if count == 0 and key not in stored:
                continue
            _check_part(name, tensor, chunk, stored.get(key), file_bytes)
            numbers += count
            yield key
        if numbers != math.prod(tensor.size):
            raise Damaged(f"{INDEX} has {numbers} of the {math.prod(tensor.size)} elements of {name}")
        if not _fill([chunk for chunk in tensor.chunks if math.prod(chunk.sizes)], 2 * len(tensor.size)):
            raise Damaged(f"{INDEX} has overlapping chunks of {name}")
        claimed_bytes += numbers * tensor.properties.dtype.itemsize
    if claimed_bytes > sum(file_bytes.values()):
        raise Damaged(f"{INDEX} claims {claimed_bytes} bytes, but the files have {sum(file_bytes.values())}")


def _fill(chunks: list[ChunkStorageMetadata], most_cuts: int) -> bool:
    """Return whether chunks with as many elements as their tensor fill it, that is, whether no two of them overlap.

    Recursive straight cuts have to separate them, as they do for shards of a mesh and slices of a flat buffer. This
    avoids a comparison of all pairs.

    Args:
        most_cuts: the maximum number of nested cuts.
    """
    if len(chunks) < 2:
        return True
    for dimension in range(len(chunks[0].sizes) if most_cuts else 0):
        groups: list[list[ChunkStorageMetadata]] = []
        end = -1
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dimension]):
            if chunk.offsets[dimension] >= end:
                groups.append([])
            groups[-1].append(chunk)
            end = max(end, chunk.offsets[dimension] + chunk.sizes[dimension])
        if len(groups) > 1:
            return all(_fill(group, most_cuts - 1) for group in groups)
    return False


def _check_part(
    name: str,
    tensor: TensorStorageMetadata,
    chunk: ChunkStorageMetadata,
    info: _StorageInfo | None,
    file_bytes: Mapping[str, int],
) -> None:
    shape, start, size = tuple(tensor.size), tuple(chunk.offsets), tuple(chunk.sizes)
    if not len(shape) == len(start) == len(size) or any(a + b > c for a, b, c in zip(start, size, shape, strict=True)):
        raise Damaged(f"{INDEX} has a chunk outside of {name}")
    if info is None:
        raise Damaged(f"{INDEX} does not say where a chunk of {name} is stored")
    needed_bytes = math.prod(size) * tensor.properties.dtype.itemsize
    if needed_bytes > info.length or info.offset + info.length > file_bytes[info.relative_path]:
        raise Damaged(f"{info.relative_path} is shorter than {INDEX} says")
