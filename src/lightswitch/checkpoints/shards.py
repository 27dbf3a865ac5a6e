"""Local shards of tensors, and sharded tensors in the state of callbacks and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import transform_subclass

Box = tuple[tuple[int, ...], Tensor]  # offsets in the whole tensor, and the values, in the rank's own memory


@dataclass(frozen=True)
class Piece:
    """Shard of a tensor that is a contiguous range of its flattened elements, written and read without a collective.

    A checkpoint stores boxes, so a Piece is stored as several.

    Args:
        values: (elements,), in this rank's memory; empty if this rank holds no element of the tensor.
        shape: the shape of the whole tensor.
        first: index of the first element in the flattened whole tensor.
    """

    values: Tensor
    shape: Size
    first: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the same elements of a whole tensor: (elements,)."""
        return whole.reshape(-1).narrow(0, self.first, self.values.numel())

    def with_values(self, values: Tensor) -> Piece:
        """Return the same shard with other values, (elements,), for example of an optimizer's state."""
        return replace(self, values=values)

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the whole tensor that make up the shard."""
        begin = 0
        for offsets, sizes in _boxes(self.shape, self.first, self.first + self.values.numel()):
            yield offsets, self.values.narrow(0, begin, prod(sizes)).view(sizes)
            begin += prod(sizes)


Stored = Tensor | Piece


def boxes(stored: Stored) -> Iterator[Box]:
    """Yield the boxes of a whole tensor that this rank holds."""
    here = local(stored)
    if isinstance(stored, Piece):
        found: Any = stored.boxes()
    elif isinstance(stored, DTensor):
        chunks = stored.__create_chunk_list__()  # type: ignore[no-untyped-call]  # untyped in torch
        found = ((tuple(chunk.offsets), here) for chunk in chunks)
    else:
        found = [((0,) * here.dim(), here)]
    yield from (box for box in found if box[1].numel())


def _boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes that make up elements ``first`` to ``end``, in the order of the elements."""
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
    """Return this rank's local shard of a DTensor or Piece, or a plain tensor itself, in the same memory."""
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
        return part if isinstance(inner, Tensor) else inner  # for example, a mesh

    whole: Tensor = transform_subclass(stored.detach(), replaced)  # type: ignore[no-untyped-call]  # untyped in torch
    return whole


def sharded_like(parameters: Mapping[str, nn.Parameter], name: str, whole: Tensor) -> Tensor:
    """Return a whole tensor sharded like the parameter of a name, else like the first one of its shape, if that is."""
    named = [parameters[name]] if name in parameters else parameters.values()
    like = next((one for one in named if isinstance(one, DTensor) and one.shape == whole.shape), None)
    if like is None:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
