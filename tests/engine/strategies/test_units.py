"""Blocks are found where models keep them."""

from __future__ import annotations

import pytest
from torch import nn

from lightswitch.errors import Refused
from lightswitch.strategies.units import find_units


def _block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


def test_the_blocks_of_a_transformer() -> None:
    encoder = nn.TransformerEncoder(_block(), 3, enable_nested_tensor=False)
    assert list(find_units(nn.ModuleDict({"encoder": encoder}))) == [f"encoder.layers.{index}" for index in range(3)]


def test_the_outermost_of_nested_ones() -> None:
    stages = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    assert list(find_units(stages)) == ["0", "1"]


def test_layers_with_a_matrix_and_no_norms() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv1d(2, 2, 1))
    assert list(find_units(layers)) == ["0", "2"]


def test_a_list_of_lists_is_no_unit_for_it_has_no_forward() -> None:
    lists = nn.ModuleList(nn.ModuleList(_block() for _ in range(2)) for _ in range(2))
    assert list(find_units(lists)) == ["0.0", "0.1", "1.0", "1.1"]


def test_tied_blocks_stay_with_the_root() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers[2].weight = layers[0].weight
    assert list(find_units(layers)) == ["1"]
    with pytest.raises(Refused, match="units: 0 shares parameters with modules outside of it"):
        find_units(layers, ["0"])


def test_a_block_that_is_used_twice_is_one_unit() -> None:
    shared = _block()
    assert list(find_units(nn.Sequential(shared, shared, _block()))) == ["0", "2"]


def test_blocks_that_have_another_path_are_found_once() -> None:
    blocks = nn.ModuleList(_block() for _ in range(2))
    assert list(find_units(nn.ModuleDict({"net": nn.ModuleDict({"blocks": blocks}), "backbone": blocks}))) == [
        "net.blocks.0",
        "net.blocks.1",
    ]


def test_named_ones_by_class_or_path() -> None:
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(_block(), 2, enable_nested_tensor=False)})
    assert list(find_units(model, ["MultiheadAttention"])) == [f"encoder.layers.{index}.self_attn" for index in (0, 1)]
    assert list(find_units(model, ["encoder.layers.*.linear1", "encoder"])) == [
        "encoder",
        "encoder.layers.0.linear1",
        "encoder.layers.1.linear1",
    ]


def test_a_name_that_fits_nothing_is_told_with_those_there_are() -> None:
    with pytest.raises(Refused, match="Blok is neither a class nor a path in Sequential; its classes are Linear"):
        find_units(nn.Sequential(nn.Linear(2, 2)), ["Blok"])
