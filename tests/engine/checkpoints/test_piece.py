from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from lightswitch.checkpoints import directory, index
from lightswitch.checkpoints.reader import Reader
from lightswitch.checkpoints.shards import Piece

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(Size)


@given(SHAPES, st.floats(0, 1), st.floats(0, 1))
def test_a_piece_is_cut_into_few_boxes_that_hold_its_elements(shape: Size, one: float, other: float) -> None:
    first, end = sorted(int(part * prod(shape)) for part in (one, other))
    piece, whole = Piece(torch.arange(first, end), shape, first), torch.full(shape, -1)
    items = piece.__create_write_items__("x", piece)
    for item in items:
        box = whole
        for dimension, (offset, size) in enumerate(zip(item.index.offset, item.tensor_data.chunk.sizes, strict=True)):
            box = box.narrow(dimension, offset, size)
        box.copy_(piece.__get_tensor_shard__(item.index))
    assert whole.flatten().tolist() == [i if first <= i < end else -1 for i in range(prod(shape))]
    assert len(items) <= max(1, 2 * len(shape) - 1)


def test_a_piece_is_written_and_read_alone_also_of_what_is_empty(tmp_path: Path) -> None:
    whole, empty = torch.arange(24.0).view(4, 6), Piece(torch.zeros(0), Size((0, 3)), 0)
    pieces = {"model.w": whole, "model.flat": Piece(torch.arange(12.0), Size((3, 4)), 0), "model.none": empty}
    directory.write(tmp_path / "a.ckpt", pieces, {}, ranks=None)
    reader, read = Reader(tmp_path / "a.ckpt", None), Piece(torch.zeros(9), Size((4, 6)), 7)
    reader.fill({"model.w": read, "model.none": empty})
    assert read.values.equal(whole.flatten()[7:16])
    assert reader.read("model.flat").equal(torch.arange(12.0).view(3, 4))
    assert reader.like["model.none"].shape == (0, 3)


@given(SHAPES, st.lists(st.floats(0, 1), max_size=4))
def test_pieces_of_any_sizes_are_known_to_fill_their_tensor(shape: Size, cuts: list[float]) -> None:
    ends = sorted({int(part * prod(shape)) for part in (0, *cuts, 1)})
    pieces = [Piece(torch.arange(*ends), shape, ends[0]) for ends in pairwise(ends)]
    chunks = [item.tensor_data.chunk for piece in pieces for item in piece.__create_write_items__("x", piece)]
    assert index._fill(chunks, 2 * len(shape))
    assert not index._fill([*chunks, chunks[0]], 2 * len(shape))
