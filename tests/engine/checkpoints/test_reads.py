"""Who reads what of a checkpoint: each rank reads the rows that it needs."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor

from lightswitch.checkpoints import directory
from lightswitch.checkpoints.reading import Reader
from lightswitch.checkpoints.shards import Piece
from lightswitch.errors import UnfitCheckpoint, UnwrittenCheckpoint
from tests.pool import Pool, RankFailed

BOXES = st.lists(st.integers(1, 4), max_size=4).map(Size)


@given(BOXES, st.floats(0, 1), st.floats(0, 1))
def test_a_piece_is_cut_into_few_boxes_that_hold_its_elements(shape: Size, one: float, other: float) -> None:
    first, end = sorted(int(part * prod(shape)) for part in (one, other))
    piece, whole = Piece(torch.arange(first, end), shape, first), torch.full(shape, -1)
    found = [*piece.boxes()]
    for offsets, values in found:
        box = whole
        for dimension, (offset, size) in enumerate(zip(offsets, values.shape, strict=True)):
            box = box.narrow(dimension, offset, size)
        box.copy_(values)
    assert whole.flatten().tolist() == [i if first <= i < end else -1 for i in range(prod(shape))]
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_piece_is_written_and_read_alone_also_of_what_is_empty(tmp_path: Path) -> None:
    whole, empty = torch.arange(24.0).view(4, 6), Piece(torch.zeros(0), Size((0, 3)), 0)
    pieces = {"model.w": whole, "model.flat": Piece(torch.arange(12.0), Size((3, 4)), 0), "model.none": empty}
    directory.write(tmp_path / "a.ckpt", pieces, {}, ranks=None)
    reader, read = Reader(tmp_path / "a.ckpt", None), Piece(torch.zeros(9), Size((4, 6)), 7)
    reader.fill({"model.w": read, "model.none": empty})
    assert read.values.equal(whole.flatten()[7:16])
    assert reader.read("model.flat").equal(torch.arange(12.0).view(3, 4))
    assert reader.like["model.none"].shape == (0, 3)


def test_a_part_of_a_tensor_is_no_checkpoint(tmp_path: Path) -> None:
    half = {"model.w": Piece(torch.zeros(12), Size((4, 6)), 12)}
    with pytest.raises(UnwrittenCheckpoint, match=r"index\.json has 12 of the 24 elements of model\.w"):
        directory.write(tmp_path / "a.ckpt", half, {}, ranks=None)
    assert [*tmp_path.iterdir()] == []


RANKS = 4
SHAPES = {"a": (1000, 1000), "b": (300, 7, 50), "one": (), **{f"small.{n}": (n, 40) for n in range(8)}}


def value(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(SHAPES[name], generator=generator).to(torch.bfloat16 if name == "b" else torch.float32)


def whole(name: str, rank: int) -> Tensor:
    return torch.zeros_like(value(name))


def piece(name: str, rank: int) -> Piece:
    """Which lies across what any other number of ranks have written."""
    size = value(name).numel()
    first, end = size * rank // RANKS, size * (rank + 1) // RANKS
    return Piece(torch.zeros(end - first, dtype=value(name).dtype), value(name).shape, first)


def bytes_read() -> int:
    """By this process, from files, in all."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)


def filled(path: Path, room: Callable[[str, int], Tensor | Piece]) -> int:
    """Read a checkpoint's tensors as a rank; return the bytes that it has read."""
    dist.init_process_group("gloo")
    reader, rank = Reader(path, dist.new_group()), dist.get_rank()
    rooms = {name: room(name, rank) for name in SHAPES}
    before = bytes_read()
    reader.fill(rooms)
    after = bytes_read()
    for name, one in rooms.items():
        expected = one.of(value(name)) if isinstance(one, Piece) else value(name)
        assert torch.equal(one.values if isinstance(one, Piece) else one, expected), name
    return after - before


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.bin"))


@pytest.mark.parametrize(("room", "times"), [(whole, RANKS), (piece, 1)])
def test_a_rank_reads_the_rows_that_it_needs(
    room: Callable[[str, int], Any], times: int, pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    directory.write(path, {name: value(name) for name in SHAPES}, {}, ranks=None)
    read = pool(RANKS)(filled, path, room)
    assert sum(read) <= 1.2 * times * size_of(path)


def test_a_file_that_one_rank_can_not_read_is_told_by_all(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    directory.write(path, {name: value(name) for name in SHAPES}, {}, ranks=None)
    with pytest.raises(RankFailed) as failed:
        pool(RANKS)(cut_and_filled, path)
    assert isinstance(failed.value.error, UnfitCheckpoint)
    assert "a.ckpt can't be read as a checkpoint: rank " in str(failed.value.error)


def cut_and_filled(path: Path) -> None:
    dist.init_process_group("gloo")
    reader = Reader(path, dist.new_group())
    dist.barrier()
    if dist.get_rank() == 0:
        for file in path.glob("*.bin"):
            file.write_bytes(file.read_bytes()[:100_000])
    dist.barrier()
    reader.fill({name: whole(name, 0) for name in SHAPES})
