"""Local shards of tensors: also contiguous elements, where a strategy cuts flat buffers of many parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import transform_subclass


@dataclass(frozen=True)
class Piece:
    """Contiguous elements of a tensor, written and read without a collective.

    A checkpoint is made of boxes, so a piece gives itself as several. The dunder methods are those that
    torch.distributed.checkpoint looks for; its planners have to ask for the third one.

    Args:
        values: (elements,), in memory that is this rank's own; empty where it keeps nothing of the tensor.
        shape: of the whole tensor.
        first: index of the first element in the whole tensor, flattened.
    """

    values: Tensor
    shape: Size
    first: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the same elements of a whole tensor: (elements,)."""
        return whole.reshape(-1).narrow(0, self.first, self.values.numel())

    def with_values(self, values: Tensor) -> Piece:
        """Return the piece with other values: (elements,), as of an optimizer's state."""
        return replace(self, values=values)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = _boxes(self.shape, self.first, self.first + self.values.numel())
        return [ChunkStorageMetadata(Size(offsets), Size(sizes)) for offsets, sizes in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunks = self.__create_chunk_list__()
        begins = accumulate((chunk.sizes.numel() for chunk in chunks), initial=0)
        begin, sizes = next((b, c.sizes) for b, c in zip(begins, chunks, strict=False) if c.offsets == index.offset)
        return self.values.narrow(0, begin, sizes.numel()).view(sizes)


Stored = Tensor | Piece


def _boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes that make up elements ``first`` to ``end``, in the order of the elements."""
    if prod(shape) == 0:  # an empty tensor has one empty box, or the index would lack it
        yield (0,) * len(shape), shape
        return
    if first == end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    while first < end:
        at, within = divmod(first, row)
        whole_rows = (end - first) // row
        if within or not whole_rows:  # a part of one row
            stop = min(end, (at + 1) * row)
            for offsets, sizes in _boxes(shape[1:], within, stop - at * row):
                yield (at, *offsets), (1, *sizes)
        else:
            stop = first + whole_rows * row
            yield (at, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
        first = stop


@torch.no_grad()
def local(stored: Stored) -> Tensor:
    """Return this rank's local shard of a distributed tensor, or the whole of another, in the same memory."""
    if isinstance(stored, Piece):
        return stored.values
    return stored.to_local() if isinstance(stored, DTensor) else stored.detach()


def with_local(stored: Stored, part: Tensor) -> Stored:
    """Return a tensor sharded in the same way whose local shard on this rank is ``part``, on any device."""
    if isinstance(stored, Piece):
        return stored.with_values(part)
    if not isinstance(stored, DTensor):
        return part

    def replaced(_: str, inner: Any) -> Any:
        return part if isinstance(inner, Tensor) else inner  # a mesh, for one

    whole: Tensor = transform_subclass(stored.detach(), replaced)  # type: ignore[no-untyped-call]  # torch's
    return whole
