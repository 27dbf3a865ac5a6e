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

from lightswitch.checkpoints.directory import write
from lightswitch.checkpoints.format import PlainTypes, load, restored
from lightswitch.errors import UnwrittenCheckpoint


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
    plain = PlainTypes(keeps_kinds=False)
    torch.save(plain.of({"value": value}), tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"value": expected}
    assert plain.left_out == {}


ITSELF_AGAIN: dict[str, Any] = {  # by name, what is read as it was
    "a table": np.arange(6, dtype=np.int16).reshape(2, 3),
    "a generator's state": np.random.RandomState(3).get_state(),
    "a window": deque([1.0, np.arange(2)], maxlen=5),
    "an endless one": deque([{"x": deque()}]),
    "by odd keys": {(1, np.int64(2)): np.ones(2, dtype=bool), None: [(np.float64(1), np.zeros(()))]},
}


@pytest.mark.parametrize("name", ITSELF_AGAIN)
def test_arrays_and_the_like_are_what_they_were(name: str, tmp_path: Path) -> None:
    value = ITSELF_AGAIN[name]
    torch.save(PlainTypes().of({"value": value, "callbacks": {"own": {"value": value}}}), tmp_path / "state.pt")
    read = restored(load(tmp_path / "state.pt"), _whole)
    assert read.keys() == {"value", "callbacks"}
    assert same(read["value"], value)
    assert same(read["callbacks"]["own"]["value"], value)


def _whole(name: str, whole: torch.Tensor) -> torch.Tensor:
    return whole


def same(one: Any, other: Any) -> bool:
    if isinstance(other, np.generic):
        return one == other.item()
    if type(one) is not type(other):
        return False
    if isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(other, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(other, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


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
    plain = PlainTypes()
    torch.save(plain.of({"value": value}), tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"value": {"width": 8}}
    assert plain.left_out == told


UNREADABLE = {
    "meta": torch.ones(2, device="meta"),
    "lazy": nn.UninitializedParameter(),
    "mkldnn": torch.ones(2).to_mkldnn(),
}


def test_tensors_that_torch_can_not_read_are_left_out_and_the_others_read(tmp_path: Path) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    plain = PlainTypes()
    torch.save(plain.of({**UNREADABLE, "rows": rows, "sparse": torch.eye(2).to_sparse()}), tmp_path / "state.pt")
    read = load(tmp_path / "state.pt")
    assert plain.left_out.keys() == {*UNREADABLE, "rows"}
    assert torch.equal(read["sparse"].to_dense(), torch.eye(2))


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UnwrittenCheckpoint, match=r": trainer\.pt is damaged"):
        write(tmp_path / "a.ckpt", {}, {"epoch": 0, "callbacks": {"own": {"x": [1], "seen": 1 << 2100}}}, None)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "values", [torch.arange(4.0), nn.Parameter(torch.arange(4.0)), torch.arange(4.0).as_subclass(Ids), np.arange(4.0)]
)
def test_tensors_and_arrays_are_copies(values: Any, tmp_path: Path) -> None:
    plain = PlainTypes().of({"values": values, "backwards": np.arange(4.0)[::-1]})
    with torch.no_grad():
        values[0] = 9
    torch.save(plain, tmp_path / "state.pt")
    read = restored(load(tmp_path / "state.pt"), _whole)
    assert read["values"].tolist() == [0, 1, 2, 3]
    assert read["backwards"].tolist() == [3, 2, 1, 0]
