"""The files of a checkpoint, with their bytes, for every rank of a world: what is written follows from one rank."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import prod
from typing import IO, Any, cast

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
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.serialization import skip_data

from lightswitch.checkpoints.flat_shard import Piece, Stored
from lightswitch.checkpoints.saver import Copies, owners

Shape = tuple[int, ...]
_FILE = "__0_0.distcp"
_FOLDER, _SAVE = "/" + 79 * "-", 36 * "-"  # a path, which is not known, and a UUID
_DIGITS = 9  # of a name that stands for a tensor's


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor over a world.

    Attributes:
        shape: of the whole tensor.
        axes: of the mesh, those that it is spread or repeated over, each with its placement; none for a tensor that
            each rank holds whole.
        is_of_first: the first of the ranks that hold copies writes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[tuple[str, Placement], ...] = ()
    is_of_first: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Chunk:
    """Part of a tensor that one rank holds: which of its copies, where it begins in the whole, and its shape."""

    copies: Copies
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Files:
    """The files that hold a checkpoint's tensors.

    Attributes:
        bytes: of each rank's file, in the order of ranks.
        chunks: parts of tensors that the index lists.
        tensors: how many there are.
        index_bytes: of the index, `.metadata`, about.
    """

    bytes: tuple[int, ...]
    chunks: int
    tensors: int
    index_bytes: int

    @staticmethod
    def name(rank: int) -> str:
        """Return the name of a rank's file."""
        return f"__{rank}_0.distcp"


def layouts(
    tensors: Mapping[str, Stored], unnamed: str = "", of_first: Set[str] = frozenset()
) -> dict[str, Layout] | None:
    """Return the layouts of one rank's tensors; None where flat buffers are cut, which each rank does for itself.

    Args:
        of_first: names of tensors that the first of the ranks writes which hold copies.
        unnamed: the axis of a mesh that has one, without a name.
    """
    if any(isinstance(tensor, Piece) for tensor in tensors.values()):
        return None
    found = {name: _layout(tensor, unnamed) for name, tensor in tensors.items() if not isinstance(tensor, Piece)}
    return {name: replace(layout, is_of_first=name in of_first) for name, layout in found.items()}


def _layout(tensor: torch.Tensor, unnamed: str) -> Layout:
    if not isinstance(tensor, DTensor):
        return Layout(tuple(tensor.shape), tensor.dtype)
    names = tensor.device_mesh.mesh_dim_names or (unnamed,)
    return Layout(tuple(tensor.shape), tensor.dtype, tuple(zip(names, tensor.placements, strict=True)))


def files(tensors: Mapping[str, Layout], axes: Mapping[str, int]) -> Files:
    """Return the files that the ranks of a mesh write, as they and torch.distributed.checkpoint share them out.

    Of copies that ranks know of, one rank writes each (`shares.owners`); of those that only torch's index shows, the
    rank that has least to write by then (torch, `dedup_save_plans`).

    Args:
        axes: sizes of the mesh by the names of its axes, in order.
    """
    world = [dict(zip(axes, at, strict=True)) for at in product(*map(range, axes.values()))]
    chunks = {layout: _chunks(layout, axes, world) for layout in set(tensors.values())}
    counts = {name: chunks[layout][0].copies.count for name, layout in tensors.items()}
    shared = {name: count for name, count in counts.items() if count > 1 and not tensors[name].is_of_first}
    writers = owners({name: (count, tensors[name].bytes) for name, count in shared.items()})
    kinds = list(chunks)  # by their numbers from here on: a million times, a layout's hash takes long
    kind_of = {name: kinds.index(layout) for name, layout in tensors.items()}
    alike = [_alike(chunks[layout]) for layout in kinds]
    held = [[prod(chunk.shape) * layout.dtype.itemsize for chunk in chunks[layout]] for layout in kinds]
    bytes_of, in_order = cache(stored_bytes), cache(partial(_staged, kind_of))
    planned, written, parts = [0] * len(world), [0] * len(world), 0
    for rank in range(len(world)):
        own = [chunks[layout][rank].copies.own for layout in kinds]
        for name in in_order(tuple(of_ranks[rank] for of_ranks in held)):
            kind = kind_of[name]
            holders = alike[kind][rank]
            if own[kind] != writers.get(name, 0) or rank != holders[0]:  # it was shared out when the first of them came
                continue
            chosen = rank if len(holders) == 1 else min(holders, key=planned.__getitem__)
            planned[chosen] += held[kind][holders[-1]] or 1  # torch reckons with the last one's
            written[chosen] += bytes_of(chunks[kinds[kind]][chosen].shape, kinds[kind].dtype)
            parts += 1
    entries = [_entry(layout, chunks[layout], bytes_of) for layout in kinds]
    index_bytes = empty_bytes() + sum(entries[kind].bytes_as(name) for name, kind in kind_of.items())
    return Files(tuple(written), parts, len(tensors), index_bytes)


def _entry(layout: Layout, chunks: Sequence[_Chunk], bytes_of: Callable[[Shape, torch.dtype], int]) -> Entry:
    """Return what the index says of a tensor: of its copies, one is written."""
    parts = {chunk.offset: chunk.shape for chunk in chunks if chunk.copies.own == 0}
    part_bytes = bytes_of(chunks[0].shape, layout.dtype)
    return entry(layout.shape, layout.dtype, parts, part_bytes, len(chunks))


def _staged(kind_of: Mapping[str, int], held: Sequence[int]) -> list[str]:
    """Return the names in the order in which a rank copies them, the largest first, given what it holds of a kind."""
    return sorted(kind_of, key=lambda name: -held[kind_of[name]])


def _alike(chunks: Sequence[_Chunk]) -> list[list[int]]:
    """Return, for each rank, those that have the same part of the same copy."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, chunk in enumerate(chunks):
        found[chunk.copies.own, chunk.offset].append(rank)
    return [found[chunk.copies.own, chunk.offset] for chunk in chunks]


def _chunks(layout: Layout, axes: Mapping[str, int], world: Iterable[Mapping[str, int]]) -> list[_Chunk]:
    """Return what each rank holds of a tensor."""
    ranks = list(world)
    if not layout.axes:
        return [_Chunk(Copies(len(ranks), rank), (0,) * len(layout.shape), layout.shape) for rank in range(len(ranks))]
    names, placements = zip(*layout.axes, strict=True)
    sizes = [axes[name] for name in names]
    at = cache(partial(_chunk, layout.shape, placements, tuple(sizes)))
    return [at(tuple(rank[name] for name in names)) for rank in ranks]


def _chunk(
    shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> _Chunk:
    local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
    return _Chunk(Copies.on_mesh(placements, sizes, coordinate), tuple(offset), tuple(local))


def stored_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return what a tensor takes in a file."""
    return saved_bytes(torch.empty(shape, dtype=dtype))  # its memory is not touched, and so not taken


def saved_bytes(value: object) -> int:
    """Return what a value takes in a file, by torch's own writer, which leaves the values of tensors out."""
    stream = _Counting()
    with skip_data():
        torch.save(value, cast(IO[bytes], stream))
    return stream.tell()


class _Counting(io.RawIOBase):
    """Stream that keeps nothing but its position."""

    def __init__(self) -> None:
        super().__init__()
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        count = memoryview(data).nbytes  # type: ignore[arg-type]  # bytes, or what gives them
        self._position += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def tell(self) -> int:
        return self._position


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
