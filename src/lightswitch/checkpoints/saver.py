"""Staging and writing of checkpoint tensors: the rank that writes each, its copy in host memory, the writer thread."""

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
_ALIGNED_BYTES = 64  # a cache line, and a multiple of every dtype's size


class Saver:
    """Queue of checkpoint writes in a thread, and of actions that run only if the write before them succeeded.

    Every rank must queue the same writes in the same order.

    Attributes:
        is_good: whether the last write succeeded.
        has_lost_a_rank: whether the last write failed with LostRank, so that its process group is no longer usable.
    """

    def __init__(self) -> None:
        self._last: Thread | None = None  # the last thread queued; each waits for the one before it
        self.is_good = True
        self.has_lost_a_rank = False
        self._failure: Exception | None = None
        self._pools = {is_pinned: Pool(is_pinned) for is_pinned in (False, True)}

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies on the CPU, in memory that the next checkpoint reuses. Of a DTensor, copy the local tensor.

        Training waits for this, and for the previous write, which must be complete before the call.
        """
        for pool in self._pools.values():
            pool.reuse()
        largest_first = sorted(tensors.items(), key=lambda item: -local(item[1]).nbytes)
        staged = {name: self._copy(tensor) for name, tensor in largest_first}
        for device in {tensor.device for tensor in map(local, tensors.values()) if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the copies are asynchronous
        return staged

    def write(self, write: Action) -> None:
        """Queue a write; its error is stored for `failure`."""

        def attempt() -> None:
            try:
                write()
                self.is_good, self.has_lost_a_rank = True, False
            except Exception as error:  # the disk, a lost rank, or a bug, which this thread would otherwise swallow
                self.is_good, self._failure = False, error
                self.has_lost_a_rank = isinstance(error, LostRank)

        self._start(attempt)

    def then(self, action: Action) -> None:
        """Queue an action to run after the last write; it is skipped if that write failed."""

        def attempt() -> None:
            try:
                if self.is_good:
                    action()
            except OSError as error:
                self._failure = error

        self._start(attempt)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the queue is empty, and return False if that takes longer than the timeout."""
        if self._last is not None:
            self._last.join(timeout_seconds)
        return self._last is None or not self._last.is_alive()

    def failure(self) -> Exception | None:
        """Return the error of a failed write or action, and clear it; None if none failed since the last call."""
        message, self._failure = self._failure, None
        return message

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
            return self._copied(inner) if isinstance(inner, Tensor) else inner  # for example, a mesh

        whole: Tensor = transform_subclass(tensor, copied)
        return whole

    def _copied(self, part: Tensor) -> Tensor:
        kept = self._pools[part.is_cuda].empty(part.shape, part.dtype)
        return kept.copy_(part.detach(), non_blocking=part.is_cuda)


@dataclass(frozen=True)
class Copies:
    """Replicas of a local tensor: their number, and the index of this rank among them."""

    count: int
    own: int

    @classmethod
    def on_mesh(cls, placements: Iterable[Placement], sizes: Iterable[int], coordinate: Iterable[int]) -> Copies:
        """Return the replicas of a DTensor's shard at a coordinate of its mesh."""
        count, own = 1, 0
        for placement, size, position in zip(placements, sizes, coordinate, strict=False):
            if placement.is_replicate():
                count, own = count * size, own * size + position
        return cls(count, own)


def share(tensors: Tensors, rank: int, world_size: int, of_first: Set[str] = frozenset()) -> dict[str, Stored]:
    """Return the tensors that a rank writes, so that each replicated tensor is written once and the load is balanced.

    A plain tensor is replicated on all ranks, a DTensor as its mesh says, a Piece not at all. All ranks reach the same
    result without communication if their `fingerprint` is the same.

    Args:
        of_first: names of tensors whose values may differ by rank; the first replica writes them.
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
    """Return the index of the replica that writes each tensor, by name.

    Args:
        held: the number of replicas and the bytes of the whole tensor, by name.
    """
    written_bytes: dict[int, list[int]] = {}  # of each replica so far, by the number of replicas
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
    """Return the replicas of each tensor that has more than one, by name."""
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
    """CPU memory in chunks that are reused for each checkpoint.

    torch rounds a pinned block up to a power of two, so that one block for each tensor would take up to twice the
    bytes. Here a chunk is a power of two from the start, and several tensors share it; if a tensor needs a chunk larger
    than `CHUNK_BYTES`, the next tensors use the rest of it. Allocated in order of size, the largest first, tensors
    leave about one chunk unused.

    Args:
        is_pinned: whether the memory is pinned, so that a GPU copies to it while it computes.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._chunks: list[Tensor] = []
        self._used_bytes: list[int] = []  # of each chunk

    @property
    def bytes(self) -> int:
        """Size of all chunks in bytes."""
        return sum(chunk.numel() for chunk in self._chunks)

    def reuse(self) -> None:
        """Free all tensors at once; they must not be used any more."""
        self._used_bytes = [0] * len(self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        needed_bytes = math.prod(shape) * dtype.itemsize
        number = self._chunk_with(needed_bytes)
        begin = self._used_bytes[number]
        self._used_bytes[number] += -(-needed_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._chunks[number][begin : begin + needed_bytes].view(dtype).view(tuple(shape))

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
                "saves      to unpinned memory, which makes training wait longer: %s",
                str(error).partition("\n")[0],
            )
            return self._chunk(bytes)
