"""The files of a checkpoint: tensors and their index, the state beside them, and the checksums of all.

tensors_0.bin   the values of the shards that rank 0 has written, one after the other, little-endian, without a header
index.json      {"format": 1, "tensors": {NAME: {"dtype": "float32", "shape": [16, 2], "shards": [SHARD, …]}, …}}
                SHARD is {"file": "tensors_0.bin", "bytes": [BEGIN, END], "offset": [8, 0], "shape": [8, 2]}: a box of
                the whole tensor, and the bytes of the file that are its elements, in row-major order
trainer.pt      the rest, in types that `torch.load(weights_only=True)` reads
SHA256SUMS      a line for each file above, in the format of `sha256sum -c`
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightswitch.checkpoints.shards import Stored, boxes, local

# torch 2.15 warns that it checks the indices of each sparse tensor, as it should
warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)

INDEX, STATE, SUMS = "index.json", "trainer.pt", "SHA256SUMS"
_FORMAT = 1


class Damaged(ValueError):
    """Damage of a checkpoint's file, or a mismatch between a file and the others."""


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

    def check(self, source: str) -> Index:
        """Check that the shards are within their files and tensors and make up all elements.

        Raises:
            Damaged: they are not; the message names the file of the index, ``source``.
        """
        files = {shard.file for shards in self.shards.values() for shard in shards}
        file_bytes = {name: _bytes_of_file(self.path / name) for name in files}
        for name, like in self.like.items():
            elements = 0
            for shard in self.shards[name]:
                sides = [*zip(shard.offsets, shard.sizes, like.shape, strict=False)]
                if not len(shard.offsets) == len(shard.sizes) == like.dim() or any(a + b > c for a, b, c in sides):
                    raise Damaged(f"{source} has a shard outside of {name}")
                if shard.begin + self.bytes(shard) > shard.end or shard.end > file_bytes[shard.file]:
                    raise Damaged(f"{shard.file} is shorter than {source} says")
                elements += math.prod(shard.sizes)
            if elements != like.numel():
                raise Damaged(f"{source} has {elements} of the {like.numel()} elements of {name}")
        return self


def _bytes_of_file(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unread(path.name, error) from error


def _unread(name: str, error: OSError) -> Damaged:
    is_missing = isinstance(error, FileNotFoundError)
    return Damaged(f"{name} is missing" if is_missing else f"{name} can't be read: {error.strerror}")


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


def write_index(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
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
    _parsed(folder, found).check(INDEX)
    (folder / INDEX).write_text(json.dumps(found, separators=(",", ":")))


def read_index(path: Path) -> Index:
    """Return the index in a checkpoint's directory.

    Raises:
        Damaged: with the reason. No memory is allocated for the sizes in the index before they are compared with the
            sizes of the files.
    """
    try:
        return _parsed(path, json.loads((path / INDEX).read_bytes())).check(INDEX)
    except Damaged:
        raise
    except OSError as error:
        raise _unread(INDEX, error) from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise Damaged(f"{INDEX} is not an index of tensors") from error


def _parsed(path: Path, found: Any) -> Index:
    if found["format"] != _FORMAT:
        raise Damaged(f"{INDEX} has format {found['format']}, expected {_FORMAT}; use the lightswitch that wrote it")
    like, shards = {}, {}
    for name, described in found["tensors"].items():
        like[name] = torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device="meta")
        shards[name] = [
            Shard(name, tuple(one["offset"]), tuple(one["shape"]), one["file"], *one["bytes"])
            for one in described["shards"]
        ]
    return Index(path, like, shards)


# The checksums


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums, given by file name."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def read_sums(folder: Path) -> dict[str, str]:
    """Return the checksums in a checkpoint by file name.

    Raises:
        Damaged: there is no SHA256SUMS, or it is damaged.
    """
    try:
        lines = (folder / SUMS).read_text().splitlines()
        return {name: digest for digest, name in (line.split("  ") for line in lines)}
    except FileNotFoundError as error:
        raise Damaged(f"it has no {SUMS}") from error
    except OSError as error:
        raise _unread(SUMS, error) from error
    except ValueError as error:
        raise Damaged(f"{SUMS} is damaged") from error


def compare_sums(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Compare some files of a checkpoint with their checksums.

    Raises:
        Damaged: a file has no checksum, can't be read, or differs from its checksum.
    """
    for name in names:
        if name not in sums:
            raise Damaged(f"{SUMS} has no checksum of {name}")
        try:
            found = sum_of(folder / name)
        except OSError as error:
            raise _unread(name, error) from error
        if found != sums[name]:
            raise Damaged(f"{name} differs from its checksum")


def sum_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The state


def save(path: Path, value: Any) -> None:
    """Write a file of `torch.save`.

    Raises:
        OSError: the disk is full, or fails.
    """
    try:
        with path.open("wb") as file:
            torch.save(value, file)
    except RuntimeError as error:  # torch's, in the course of the disk's, that the file is too short
        raise error.__context__ or error from None


def load(path: Path, mapped: bool = False) -> Any:
    """Return the content of a file of `torch.save`, on the CPU, without running code from it.

    Args:
        mapped: memory-map tensors, so that they are read on use. A file of torch before 1.6 is no archive, and is read
            at once.

    Raises:
        Damaged: with the reason, for example a name that would run code.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=mapped and zipfile.is_zipfile(path), weights_only=True)
    except OSError as error:
        raise _unread(path.name, error) from error
    except Exception as error:  # torch raises many kinds of errors for a file that is not its own, or truncated
        if named := named_code(error):
            raise Damaged(f"{path.name} {named}") from error
        raise Damaged(f"{path.name} is damaged, or was not written by torch.save") from error


def named_code(error: BaseException) -> str | None:
    """Return a text with the name that `torch.load` refused to call; torch's own text advises to allow it."""
    found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return f"names {found[1]}, which would run code" if found else None


KIND = "lightswitch.kind"  # key of a dict that stands for a value of another type
_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device))
_OF_KIND: dict[str, Callable[..., Any]] = {"array": torch.Tensor.numpy, "deque": deque}
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ABSENT = object()


class PlainTypes:
    """Conversion of a state to types that `load` reads, and a copy of it: training may change it during the write.

    An array or a deque becomes a dict with its kind, from which `restored` makes it again; a subclass of a plain type
    becomes that type, a frozenset a tuple. Collective: a DTensor, such as a parameter's copy in a callback under fsdp,
    becomes whole, as only rank 0's state is written.

    Args:
        keeps_kinds: whether values have their kind again once they are read.

    Attributes:
        left_out: the type names of the values that have no plain form, by their paths.
    """

    def __init__(self, keeps_kinds: bool = True) -> None:
        self.left_out: dict[str, str] = {}
        self._keeps_kinds = keeps_kinds

    def of(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return a value in plain types."""
        if type(value) in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic):
            return self.of(value.item(), path)
        if isinstance(value, Enum):
            return self.of(value.value, path)
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, int | float | str):
            return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, Sequence | Set | deque):
            return self._collection(value, path)
        return self._without(value, path)

    def _tensor(self, value: Tensor, path: tuple[Any, ...]) -> Any:
        if isinstance(value, DTensor):
            return self._marked("shard", value.full_tensor().detach().cpu(), name=str(path[-1]) if path else "")
        is_wrapper, has_layout = is_traceable_wrapper_subclass(value), value.layout in _LAYOUTS
        if is_wrapper or not has_layout or is_lazy(value) or value.is_meta or value.is_quantized or value.is_nested:
            return self._without(value, path)
        copy = value.detach().cpu().clone()
        return copy if type(copy) is Tensor else copy.as_subclass(Tensor)

    def _array(self, value: np.ndarray, path: tuple[Any, ...]) -> Any:
        try:
            return self._marked("array", torch.from_numpy(value.copy()))
        except (TypeError, ValueError):  # torch has no such dtype, for example of strings
            return self.of(value.tolist(), path)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        items: dict[Any, Any] = {}
        for key, item in value.items():
            plain_key = self.of(key, path)
            if plain_key is not _ABSENT and not isinstance(plain_key, list | dict | set):
                plain = self.of(item, (*path, plain_key))
                items |= {plain_key: plain} if plain is not _ABSENT else {}
        return items

    def _collection(self, value: Any, path: tuple[Any, ...]) -> Any:
        if _SCALARS.issuperset(map(type, value)):  # a list of a million numbers takes milliseconds
            items = list(value)
        else:
            plain = [self.of(item, (*path, index)) for index, item in enumerate(value)]
            items = [item for item in plain if item is not _ABSENT]
        if isinstance(value, deque):
            return self._marked("deque", items, maxlen=value.maxlen)
        if isinstance(value, set) and not any(isinstance(item, list | dict | set) for item in items):
            return set(items)
        return tuple(items) if isinstance(value, tuple | frozenset) else items

    def _marked(self, kind: str, value: Any, **arguments: Any) -> Any:
        return {KIND: kind, "value": value, **arguments} if self._keeps_kinds else value

    def _without(self, value: Any, path: tuple[Any, ...]) -> Any:
        public = (kind for kind in type(value).__mro__ if not kind.__name__.startswith("_"))  # not Hydra's partials
        self.left_out[".".join(map(str, path))] = next(public).__name__
        return _ABSENT


def restored(value: Any, shard: Callable[[str, Tensor], Any]) -> Any:
    """Return what `PlainTypes` has converted, in its own types.

    Args:
        shard: returns a whole tensor sharded as a DTensor of its name was, or the tensor itself.
    """
    if type(value) is dict:
        items = {key: restored(item, shard) for key, item in value.items()}
        kind, content = items.pop(KIND, None), items.get("value")
        if kind == "shard":
            return shard(items["name"], items["value"])
        return items if kind not in _OF_KIND else _OF_KIND[kind](content, *[*items.values()][1:])
    if type(value) in (list, tuple) and not _SCALARS.issuperset(map(type, value)):
        return type(value)(restored(item, shard) for item in value)
    return value
