"""Which rank writes what several ranks hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement

from lightswitch.checkpoints.piece import Piece, Stored

Tensors = Mapping[str, Stored]


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
    """Return what two ranks have in common if and only if they hold copies of the same tensors."""
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
