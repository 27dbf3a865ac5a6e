"""Weights that WeightAveraging keeps: a checkpoint has the averages as its model, and what is trained beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightswitch.checkpoints import names
from lightswitch.checkpoints.reader import Reader

_MARK, _TRAINED = "averaging_state", "current_model_state"  # Lightning's keys


def named_once(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Name each average once, as weights are stored; the callback names a tied one by each of its names."""
    if _MARK in checkpoint:
        checkpoint["state_dict"] = names.first_names(checkpoint["state_dict"], module)


def restored(state: Mapping[str, Any], reader: Reader, is_fit: bool) -> dict[str, Any]:
    """Return what Lightning's callback reads from a checkpoint's state: both kinds of weights, under every name.

    Where nothing is trained, both are the averages, which are what is evaluated: the callback would load the others
    once a fit has made it.
    """
    if _MARK not in state:
        return {}
    stored = {name: reader.read(f"model.{name}") for name in reader.names("model.")} | state.get("extra_state", {})
    averages = _named(stored, state)
    return {"state_dict": averages, _TRAINED: _named(state[_TRAINED], state) if is_fit else averages}


def _named(weights: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights under each of their names."""
    tied = state.get("names_of_tied", {})
    return {**weights, **{name: weights[first] for name, first in tied.items() if first in weights}}
