"""Local shards of tensors, and shards in the state of callbacks and modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, distribute_tensor
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


KEY = "places_of_shards"  # of a checkpoint: where its state was of shards

_Place = tuple[Any, ...]  # the keys and indices that lead to it


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state with whole tensors in place of DTensors, and their places under `KEY`. Collective.

    A callback that keeps copies of parameters keeps shards under fsdp. Rank 0's state is what is written, and its
    shards would be read back by each rank.
    """
    places: list[_Place] = []
    whole: dict[str, Any] = _whole(state, (), places)
    return {**whole, KEY: places} if places else whole


def _whole(value: Any, place: _Place, places: list[_Place]) -> Any:
    if isinstance(value, DTensor):
        places.append(place)
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {key: _whole(item, (*place, key), places) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(item, (*place, index), places) for index, item in enumerate(value))
    return value


def laid_out(state: dict[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return a state that was `gathered`, with shards as the parameters of this run are cut, where they are.

    A tensor is cut as the parameter that its last key names, or the first one of its shape.
    """
    for place in state.get(KEY, ()):
        with contextlib.suppress(LookupError, TypeError):  # trusted_states has left a callback's state out
            state = _replaced(state, place, partial(_cut, name=place[-1], parameters=parameters))
    return state


def _replaced(value: Any, place: _Place, change: Callable[[Any], Any]) -> Any:
    if not place:
        return change(value)
    key, *rest = place
    changed = _replaced(value[key], tuple(rest), change)
    if isinstance(value, dict):
        return {**value, key: changed}
    return type(value)(changed if index == key else item for index, item in enumerate(value))


def _cut(whole: Tensor, name: Any, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    named = [parameters[name]] if name in parameters else parameters.values()
    like = next((one for one in named if isinstance(one, DTensor) and one.shape == whole.shape), None)
    if like is None:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
