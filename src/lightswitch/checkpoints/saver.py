"""The way of tensors into a checkpoint: which rank writes which, in what host memory, by a thread beside training."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightswitch.checkpoints.shards import Piece, Stored, local
from lightswitch.errors import LostRank

log = logging.getLogger(__name__)


Action = Callable[[], None]
Tensors = Mapping[str, Stored]
CHUNK_BYTES = 64 * 2**20
_ALIGNED_BYTES = 64  # of a cache line, and a multiple of every dtype's size


class Saver:
    """Thread that writes one checkpoint after the other, and runs what follows a write only if it succeeded.

    Every rank must ask for the same writes in the same order.

    Attributes:
        is_good: the last write succeeded.
        has_lost_a_rank: the last write failed on another rank, and its process group can't be used any more.
    """

    def __init__(self) -> None:
        self._last: Thread | None = None  # the last queued; each waits for the one before
        self.is_good = True
        self.has_lost_a_rank = False
        self._failure: Exception | None = None
        self._pools = {is_pinned: Pool(is_pinned) for is_pinned in (False, True)}

    @property
    def staging_bytes(self) -> int:
        """Memory that is kept for what is staged."""
        return sum(pool.bytes for pool in self._pools.values())

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies on the CPU, of a DTensor its local part, in memory that is kept for the next checkpoint.

        This is what training waits for, beside the end of the write before, which must be over.
        """
        for pool in self._pools.values():
            pool.reuse()
        largest_first = sorted(tensors.items(), key=lambda item: -local(item[1]).nbytes)
        staged = {name: self._copy(tensor) for name, tensor in largest_first}
        for device in {tensor.device for tensor in map(local, tensors.values()) if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # until then, the copies are under way
        return staged

    def write(self, write: Action) -> None:
        """Queue a write; its error is kept for `failure`."""

        def attempt() -> None:
            try:
                write()
                self.is_good, self.has_lost_a_rank = True, False
            except Exception as error:  # the disk, a lost rank, or a bug, which would end with this thread
                self.is_good, self._failure = False, error
                self.has_lost_a_rank = isinstance(error, LostRank)

        self._start(attempt)

    def then(self, action: Action) -> None:
        """Queue an action for after the last write; it is skipped if that failed."""

        def attempt() -> None:
            try:
                if self.is_good:
                    action()
            except OSError as error:
                self._failure = error

        self._start(attempt)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written, and return whether that came in time."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        return self._last is None or not self._last.is_alive()

    def failure(self) -> Exception | None:
        """Return why a write failed, once; None if none did since the last call."""
        told, self._failure = self._failure, None
        return told

    def _start(self, action: Action) -> None:
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            action()

        self._last = Thread(target=run, name="checkpoint", daemon=True)
        self._last.start()

    def _copy(self, tensor: Stored) -> Stored:
        if isinstance(tensor, Piece):
            return tensor.with_values(self._copied(tensor.values))
        if not is_traceable_wrapper_subclass(tensor):
            return self._copied(tensor)

        def copied(_: str, inner: Any) -> Any:
            return self._copied(inner) if isinstance(inner, Tensor) else inner  # a mesh, for one

        whole: Tensor = transform_subclass(tensor, copied)
        return whole

    def _copied(self, part: Tensor) -> Tensor:
        kept = self._pools[part.is_cuda].empty(part.shape, part.dtype)
        return kept.copy_(part.detach(), non_blocking=part.is_cuda)


@dataclass(frozen=True)
class Copies:
    """Ranks that hold the same values of a tensor: how many there are, and which of them this one is."""

    count: int
    own: int

    @classmethod
    def on_mesh(cls, placements: Iterable[Placement], sizes: Iterable[int], coordinate: Iterable[int]) -> Copies:
        """Return the copies of a DTensor that the rank at a coordinate of its mesh has one of."""
        count, own = 1, 0
        for placement, size, position in zip(placements, sizes, coordinate, strict=False):
            if placement.is_replicate():
                count, own = count * size, own * size + position
        return cls(count, own)


def share(tensors: Tensors, rank: int, world_size: int, of_first: Set[str] = frozenset()) -> dict[str, Stored]:
    """Return what a rank has to write, so that ranks which hold the same tensors write each once, and equally much.

    A tensor is held by all ranks, a DTensor by those that its mesh replicates it over, a Piece by one. All ranks decide
    alike, without asking one another, as long as their `fingerprint` is the same.

    Args:
        of_first: names of tensors whose values may differ by rank, so that the first of the ranks writes them all.
    """
    copies = _copies(tensors, rank, world_size)
    shared = copies.keys() - of_first
    writers = owners({name: (copies[name].count, _whole_bytes(tensors[name])) for name in shared})
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name not in copies or writers.get(name, 0) == copies[name].own
    }


def owners(held: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return which of a tensor's copies is written, by name, given how many there are and the bytes of the whole."""
    written_bytes: dict[int, list[int]] = {}  # by every copy so far, by the number of copies
    chosen: dict[str, int] = {}
    for name, (count, whole_bytes) in sorted(held.items(), key=lambda item: (-item[1][1], item[0])):
        loads = written_bytes.setdefault(count, [0] * count)
        chosen[name] = loads.index(min(loads))
        loads[chosen[name]] += whole_bytes
    return chosen


def fingerprint(tensors: Tensors, rank: int, world_size: int) -> str:
    """Return a hash of names, shapes, dtypes and replica counts.

    It is equal on two ranks if and only if both replicate the same tensors.
    """
    copies = _copies(tensors, rank, world_size)
    held = [(name, tuple(tensors[name].shape), str(_dtype(tensors[name])), copies[name].count) for name in copies]
    return hashlib.sha256(repr(sorted(held)).encode()).hexdigest()


def _copies(tensors: Tensors, rank: int, world_size: int) -> dict[str, Copies]:
    """Return the copies of each tensor that other ranks hold as well, by name."""
    found = {name: _copies_of(tensor, rank, world_size) for name, tensor in tensors.items()}
    return {name: copies for name, copies in found.items() if copies.count > 1}


def _copies_of(tensor: Stored, rank: int, world_size: int) -> Copies:
    if isinstance(tensor, Piece):
        return Copies(1, 0)
    if not isinstance(tensor, DTensor):
        return Copies(world_size, rank)
    mesh = tensor.device_mesh
    return Copies.on_mesh(tensor.placements, mesh.shape, mesh.get_coordinate() or ())


def _whole_bytes(tensor: Stored) -> int:
    return tensor.shape.numel() * _dtype(tensor).itemsize


def _dtype(tensor: Stored) -> torch.dtype:
    return tensor.values.dtype if isinstance(tensor, Piece) else tensor.dtype


class Pool:
    """Memory on the CPU in chunks, which stay and are handed out anew for each checkpoint.

    torch rounds a pinned block up to a power of two, so that a tensor a block takes up to twice its bytes. A chunk is
    such a power from the beginning, and several tensors share it; one that is larger than `CHUNK_BYTES` has the next
    ones behind it. Handed out by size, the largest first, tensors leave about a chunk unused.

    Args:
        is_pinned: whether a GPU copies to it beside its computing.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._chunks: list[Tensor] = []
        self._used_bytes: list[int] = []  # of each chunk

    @property
    def bytes(self) -> int:
        """All that it keeps."""
        return sum(chunk.numel() for chunk in self._chunks)

    def reuse(self) -> None:
        """Hand out the same memory again from now on; nobody may use what was handed out."""
        self._used_bytes = [0] * len(self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with a storage of its own, as `torch.save` writes the whole of one."""
        needed_bytes = math.prod(shape) * dtype.itemsize
        number = self._chunk_with(needed_bytes)
        begin = self._used_bytes[number]
        self._used_bytes[number] += -(-needed_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return _cut(self._chunks[number], begin, needed_bytes).view(dtype).view(tuple(shape))

    def _chunk_with(self, needed_bytes: int) -> int:
        for number, (chunk, used_bytes) in enumerate(zip(self._chunks, self._used_bytes, strict=True)):
            if used_bytes + needed_bytes <= chunk.numel():
                return number
        chunk_bytes = max(CHUNK_BYTES, 1 << (needed_bytes - 1).bit_length())
        self._chunks.append(self._chunk(chunk_bytes))
        self._used_bytes.append(0)
        return len(self._chunks) - 1

    def _chunk(self, bytes: int) -> Tensor:
        try:
            return torch.empty(bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as error:
            if not self._is_pinned:
                raise
            self._is_pinned = False
            log.warning(
                "saves      to memory that is not pinned, for which training waits longer: %s",
                str(error).partition("\n")[0],
            )
            return self._chunk(bytes)


def with_own_storage(part: Tensor) -> Tensor:
    """Return a contiguous part of a tensor on the CPU, in the same memory, as a tensor that has no more than that.

    torch's writer copies one that has more, and keeps all the copies until its file is written.
    """
    begin = int(part.storage_offset()) * part.itemsize
    whole = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    return _cut(whole, begin, part.nbytes).view(part.dtype).view(part.shape)


def _cut(whole: Tensor, begin: int, length: int) -> Tensor:
    """Return so many bytes of a tensor of bytes, with a storage that keeps the whole alive: (length,)."""
    storage = whole.untyped_storage()[begin : begin + length]
    return torch.empty(0, dtype=torch.uint8).set_(storage)
