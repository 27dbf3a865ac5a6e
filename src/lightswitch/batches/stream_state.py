"""The state of a stream in types that a checkpoint holds, and reads back without running code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, str, bytes)
_ARRAY = "numpy"  # key of a dict that stands for an array, which a checkpoint would give back as a tensor


def packed(state: Any) -> Any:
    """Return a state in plain types and tensors, as it is now.

    Raises:
        TypeError: it holds something else; the text is the name of its type.
    """
    if state is None or type(state) in _PLAIN:
        return state
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray) and state.dtype.kind in "biuf" and state.dtype.isnative:
        return {_ARRAY: torch.from_numpy(state.copy()), "dtype": state.dtype.str}
    if isinstance(state, dict):
        return {packed(key): packed(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(packed(value) for value in state)
    raise TypeError(type(state).__name__)


def unpacked(state: Any) -> Any:
    """Return the state that was packed."""
    if isinstance(state, dict):
        if state.keys() == {_ARRAY, "dtype"}:
            return state[_ARRAY].numpy().astype(state["dtype"])
        return {key: unpacked(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(unpacked(value) for value in state)
    return state
