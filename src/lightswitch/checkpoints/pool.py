"""Memory that checkpoints are copied to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
_ALIGNED_BYTES = 64  # of a cache line, and a multiple of every dtype's size


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
        self._chunks.append(torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._is_pinned))
        self._used_bytes.append(0)
        return len(self._chunks) - 1


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
