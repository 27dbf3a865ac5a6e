"""Which rank writes what several ranks hold."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from lightswitch.checkpoints.piece import Piece, Stored

Tensors = Mapping[str, Stored]


@dataclass(frozen=True)
class _Copies:
    """Ranks that hold the same values of a tensor: how many there are, and which of them this one is."""

    count: int
    own: int


def share(tensors: Tensors, rank: int, world_size: int) -> dict[str, Stored]:
    """Return what a rank has to write, so that ranks which hold the same tensors write each once, and equally much.

    A tensor is held by all ranks, a DTensor by those that its mesh replicates it over, a Piece by one. All ranks decide
    alike, without asking one another, as long as their `fingerprint` is the same.
    """
    copies = _copies(tensors, rank, world_size)
    written_bytes: dict[int, list[int]] = defaultdict(list)  # by every rank so far, by the number of copies
    owners: dict[str, int] = {}
    for name in sorted(copies, key=lambda name: (-_whole_bytes(tensors[name]), name)):
        loads = written_bytes[copies[name].count] or [0] * copies[name].count
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += _whole_bytes(tensors[name])
        written_bytes[copies[name].count] = loads
    return {name: tensor for name, tensor in tensors.items() if name not in copies or owners[name] == copies[name].own}


def fingerprint(tensors: Tensors, rank: int, world_size: int) -> str:
    """Return what two ranks have in common if and only if they hold copies of the same tensors."""
    copies = _copies(tensors, rank, world_size)
    held = [(name, tuple(tensors[name].shape), str(_dtype(tensors[name])), copies[name].count) for name in copies]
    return hashlib.sha256(repr(sorted(held)).encode()).hexdigest()


def local_bytes(tensor: Stored) -> int:
    """Return what a rank itself keeps of a tensor, in bytes."""
    if isinstance(tensor, Piece):
        return tensor.values.nbytes
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _copies(tensors: Tensors, rank: int, world_size: int) -> dict[str, _Copies]:
    """Return the copies of each tensor that other ranks hold as well, by name."""
    found = {name: _copies_of(tensor, rank, world_size) for name, tensor in tensors.items()}
    return {name: copies for name, copies in found.items() if copies.count > 1}


def _copies_of(tensor: Stored, rank: int, world_size: int) -> _Copies:
    if isinstance(tensor, Piece):
        return _Copies(1, 0)
    if not isinstance(tensor, DTensor):
        return _Copies(world_size, rank)
    count, own = 1, 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for placement, size, position in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=False):
        if placement.is_replicate():
            count, own = count * size, own * size + position
    return _Copies(count, own)


def _whole_bytes(tensor: Stored) -> int:
    return tensor.shape.numel() * _dtype(tensor).itemsize


def _dtype(tensor: Stored) -> torch.dtype:
    return tensor.values.dtype if isinstance(tensor, Piece) else tensor.dtype
