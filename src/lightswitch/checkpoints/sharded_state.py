"""Shards in the state of callbacks and modules: whole in a checkpoint, and shards again where the run is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

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
