"""What is looked up is what the fake mode itself returns: shapes, strides, and whose storage it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightswitch.planning.values import Repeats

aten = torch.ops.aten
CALLS: dict[str, Callable[[Tensor], tuple[Any, tuple[Any, ...]]]] = {
    "a new tensor": lambda x: (aten.mm.default, (x, x)),
    "a view": lambda x: (aten.t.default, (x,)),
    "a view of a part": lambda x: (aten.slice.Tensor, (x, 0, 1, 3)),
    "views": lambda x: (aten.split.Tensor, (x, 2)),
    "a view by strides of its own": lambda x: (aten.as_strided.default, (x, [2, 2], [1, 4], 1)),
    "what shares a storage and is no view": lambda x: (aten._unsafe_view.default, (x, [16])),
    "several new ones": lambda x: (aten.var_mean.correction, (x, [0])),
    "an argument itself": lambda x: (aten.add_.Tensor, (x, 1)),
    "another dtype": lambda x: (aten._to_copy.default, (x,)),
    "bytes of it": lambda x: (aten.view.dtype, (x, torch.uint8)),
    "nothing": lambda x: (aten._foreach_mul_.Scalar, ([x, x], 2.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_comes_again_is_what_the_mode_returns(name: str) -> None:
    with FakeTensorMode() as fake:
        repeats = Repeats(fake)
        for _ in range(3):
            x = torch.empty(4, 4)
            func, args = CALLS[name](x)
            expected, found = func(*args), repeats.call(func, args, {})
            assert _told(found, x) == _told(expected, x)


def _told(out: Any, x: Tensor) -> list[Any]:
    """What can be told of tensors without values."""
    return [
        (
            *(type(out), type(one), one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one is x),
            *(one.untyped_storage()._cdata == x.untyped_storage()._cdata, one.untyped_storage().nbytes()),
        )
        for one in tree_leaves(out)
        if isinstance(one, Tensor)
    ]


def test_other_arguments_are_another_call() -> None:
    with FakeTensorMode() as fake:
        repeats, x = Repeats(fake), torch.empty(4, dtype=torch.int64)
        dtypes = [repeats.call(aten.mul.Tensor, (x, factor), {}).dtype for factor in (1, 1.0, True, 1)]
        assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_a_new_tensor_has_a_storage_of_its_own_each_time() -> None:
    with FakeTensorMode() as fake:
        repeats, x = Repeats(fake), torch.empty(4, 4)
        made = [repeats.call(aten.mm.default, (x, x), {}) for _ in range(3)]
        assert len({one.untyped_storage()._cdata for one in made}) == 3


def test_what_goes_by_values_is_refused_each_time() -> None:
    with FakeTensorMode() as fake:
        repeats, x = Repeats(fake), torch.empty(4)
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException):
                repeats.call(aten.nonzero.default, (x,), {})


def test_a_view_of_a_freed_storage_has_that_storage() -> None:
    with FakeTensorMode() as fake:
        repeats, x = Repeats(fake), torch.empty(4, 4)
        for bytes in (64, 0, 0):
            x.untyped_storage().resize_(bytes)
            view = repeats.call(aten.t.default, (x,), {})
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
