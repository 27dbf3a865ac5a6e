"""State in plain types: whatever a module, a callback or a schedule keeps, the checkpoint that has it can be read."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightswitch.checkpoints.safe import load, safe


class Split(Enum):
    TRAIN = "train"
    SIZES = [1, 2]  # noqa: RUF012 - a member's value


class Order(IntEnum):
    FIRST = 1


class Activation(Enum):
    RELU = nn.ReLU


class Ids(torch.Tensor):
    pass


class Name(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")
ITSELF: dict[str, Any] = {"kept": 1}
ITSELF["again"] = ITSELF
DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]

KEPT: dict[str, tuple[Any, Any]] = {  # by name, a value and what is read
    "counts of labels": (dict(zip(*np.unique(["a", "b", "a"], return_counts=True), strict=True)), {"a": 2, "b": 1}),
    "numbers as keys": ({np.int64(3): np.float32(0.5)}, {3: 0.5}),
    "members as keys": ({Split.TRAIN: 0.8, Order.FIRST: 1}, {"train": 0.8, 1: 1}),
    "a path": ({Path("a/b"): Path("c")}, {"a/b": "c"}),
    "a tuple as a key": ({(Split.TRAIN, np.int32(1)): 2}, {("train", 1): 2}),
    "a named tuple": ({Point(1, 2): Point(np.int8(3), 4)}, {(1, 2): (3, 4)}),
    "sets": ({frozenset({1}): {frozenset({2})}}, {(1,): {(2,)}}),
    "a member whose value is a list": (
        {"sizes": Split.SIZES, "in a set": {Split.SIZES}},
        {"sizes": [1, 2], "in a set": [[1, 2]]},
    ),
    "kinds of mappings": ([OrderedDict(a=1), defaultdict(int, a=1), Counter("a")], [{"a": 1}] * 3),
    "kinds of lists": ([deque([1]), range(2), Name("a")], [[1], [0, 1], "a"]),
    "a config": (OmegaConf.create({"sizes": [1, {"a": 2}]}), {"sizes": [1, {"a": 2}]}),
    "names in an array": (np.array(["cat", "dog"]), ["cat", "dog"]),
    "objects in an array": (np.array([1, "a", None], dtype=object), [1, "a", None]),
    "an array of another byte order": (np.array([1, 2], dtype=">i4"), [1, 2]),
    "records": (np.array([(1, 0.5)], dtype=[("a", "i4"), ("b", "f4")]), [(1, 0.5)]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_read(name: str, tmp_path: Path) -> None:
    value, expected = KEPT[name]
    plain, left_out = safe({"value": value})
    torch.save(plain, tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"value": expected}
    assert left_out == {}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"activation": Activation.RELU, "width": 8}, {"value.activation": "type"}),
        ({"since": np.datetime64("2026-01-01"), "width": 8}, {"value.since": "date"}),
        ({Activation.RELU: 1, "width": 8}, {"value": "type"}),
        ({"by": lambda: None, "width": 8}, {"value.by": "function"}),
    ],
)
def test_what_has_no_plain_type_is_told_and_the_rest_is_read(value: Any, told: dict[str, str], tmp_path: Path) -> None:
    plain, left_out = safe({"value": value})
    torch.save(plain, tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"value": {"width": 8}}
    assert left_out == told


@pytest.mark.parametrize("value", [ITSELF, DEEP])
def test_what_is_nested_without_end_is_cut(value: Any, tmp_path: Path) -> None:
    plain, left_out = safe(value)
    torch.save(plain, tmp_path / "state.pt")
    load(tmp_path / "state.pt")
    assert left_out


@pytest.mark.parametrize(
    "values", [torch.arange(4.0), nn.Parameter(torch.arange(4.0)), torch.arange(4.0).as_subclass(Ids), np.arange(4.0)]
)
def test_tensors_and_arrays_are_copies(values: Any, tmp_path: Path) -> None:
    plain, _ = safe({"values": values, "backwards": np.arange(4.0)[::-1]})
    with torch.no_grad():
        values[0] = 9
    torch.save(plain, tmp_path / "state.pt")
    read = load(tmp_path / "state.pt")
    assert read["values"].tolist() == [0, 1, 2, 3]
    assert read["backwards"].tolist() == [3, 2, 1, 0]
