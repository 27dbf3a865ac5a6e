"""Linear digests of tensors: a digest of a difference, a sum over shards, or a change since an earlier moment.

A digest is a few sums of a tensor's elements under random signs, in double precision. The mean square of two digests'
difference estimates the squared norm of the tensors' difference (Alon, Matias and Szegedy 1996), to about 20 % here.
Two tensors with one differing bit have different digests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightswitch.checkpoints.shards import Piece, Stored, local

LENGTH = 16  # number of sums in a digest
_ROW, _ROWS = 1024, 4093  # signs repeat after their product, where only exactly opposite differences would cancel
_BLOCK_ROWS = 1024  # number of rows that are converted to double precision at once

Digest = list[float]  # LENGTH numbers


@dataclass(frozen=True)
class Shard:
    """Digest of a rank's shard of a tensor.

    Attributes:
        first: index of the shard's first element in the flattened whole tensor.
        count: number of the shard's elements.
    """

    first: int
    count: int
    digest: Digest


@dataclass(frozen=True)
class Merged:
    """Digests of tensors, merged over all ranks.

    Attributes:
        digests: digest of each whole tensor, by name.
        unequal: ranks whose copy of a shard differs from that of the first rank that holds it, by tensor name.
    """

    digests: dict[str, Digest]
    unequal: dict[str, list[int]]


@torch.no_grad()
def shards(tensors: Mapping[str, Stored]) -> dict[str, Shard]:
    """Return the digests of this rank's shards of tensors, by name.

    Collective if a DTensor is sharded along another dimension than its first.
    """
    found = {name: _shard(tensor) for name, tensor in tensors.items()}
    names = list(found)
    sums = torch.stack([found[name][2].cpu() for name in names]).tolist() if names else []
    return {name: Shard(*found[name][:2], digest) for name, digest in zip(names, sums, strict=True)}


def gathered(own: Mapping[str, Shard]) -> Merged:
    """Merge the shards of all ranks. Collective."""
    ranks: list[Any] = [own]
    if dist.is_available() and dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    return merged(ranks)


def merged(ranks: Sequence[Mapping[str, Shard]]) -> Merged:
    """Merge the shards of each rank, using the first copy of each shard."""
    digests: dict[str, Digest] = {}
    unequal: dict[str, list[int]] = {}
    names = dict.fromkeys(name for rank in ranks for name in rank)
    for name in names:
        copies: dict[tuple[int, int], Digest] = {}
        for number, rank in enumerate(ranks):
            if (shard := rank.get(name)) is None or not shard.count:
                continue
            first = copies.setdefault((shard.first, shard.count), shard.digest)
            if not _same(first, shard.digest):
                unequal.setdefault(name, []).append(number)
        digests[name] = [math.fsum(sums) for sums in zip(*copies.values(), strict=True)] or [0.0] * LENGTH
    return Merged(digests, unequal)


def norm(digest: Digest) -> float:
    """Return an estimate of the Euclidean norm of a tensor."""
    return math.sqrt(math.fsum(value * value for value in digest) / len(digest))


def minus(one: Digest, other: Digest) -> Digest:
    """Return the digest of the difference of two tensors, with 0 for equal sums that are not finite."""
    return [0.0 if _same([a], [b]) else a - b for a, b in zip(one, other, strict=True)]


def _same(one: Digest, other: Digest) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))


def _shard(tensor: Stored) -> tuple[int, int, Tensor]:
    if isinstance(tensor, Piece):
        return tensor.first, tensor.values.numel(), _sums(tensor.values, tensor.first)
    if isinstance(tensor, DTensor):
        held = local(tensor)
        first = _first_of(tensor)
        if first is None:
            held, first = tensor.full_tensor(), 0
        return first, held.numel(), _sums(held, first)
    return 0, tensor.numel(), _sums(tensor.detach(), 0)


def _first_of(tensor: DTensor) -> int | None:
    """Return the index of a rank's first element in the flattened tensor; None if its elements are not contiguous."""
    (box, *others) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # untyped in torch
    offsets, sizes, shape = box.offsets, box.sizes, tensor.shape
    if others or tuple(sizes[1:]) != tuple(shape[1:]):
        return None
    return offsets[0] * math.prod(shape[1:]) if shape else 0


def _sums(values: Tensor, first: int) -> Tensor:
    """Return the signed sums of elements from index ``first`` on: (LENGTH,), in double precision, on the CPU."""
    flat = values.reshape(-1)
    if flat.is_complex():
        flat, first = torch.view_as_real(flat).reshape(-1), 2 * first
    if flat.is_quantized or flat.is_sparse:
        flat = flat.to_dense() if flat.is_sparse else flat.dequantize()
    columns, rows = _signs(str(flat.device))
    total = torch.zeros(LENGTH, dtype=torch.float64, device=flat.device)
    at = 0
    while at < flat.numel():
        row, within = divmod(first + at, _ROW)
        count = min(flat.numel() - at, _BLOCK_ROWS * _ROW - within)
        block = flat[at : at + count].double()
        height = -(-(within + count) // _ROW)
        padded = block.new_zeros(height * _ROW)
        padded[within : within + count] = block
        numbers = torch.arange(row, row + height, device=flat.device) % _ROWS
        total += ((padded.view(height, _ROW) @ columns) * rows[numbers]).sum(0)
        at += count
    return total.cpu()


@functools.cache
def _signs(device: str) -> tuple[Tensor, Tensor]:
    """Return signs of columns, (_ROW, LENGTH), and of rows, (_ROWS, LENGTH), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    columns, rows = (torch.randint(0, 2, (n, LENGTH), generator=generator) * 2.0 - 1.0 for n in (_ROW, _ROWS))
    return columns.double().to(device), rows.double().to(device)
