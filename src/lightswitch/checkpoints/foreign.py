"""Weights out of files that this engine has not written: checkpoints of Lightning's own strategies, safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from lightswitch.checkpoints import hub_files, index, safe, zero
from lightswitch.checkpoints.names import own_name

_VERSION, _OF_ANY = "pytorch-lightning_version", "2.0.0"  # a Trainer migrates older ones
_BEFORE_NAMES = ("_forward_module.", "module.")  # DeepSpeed's and DDP's wrappers


def is_foreign(path: Path) -> bool:
    """Return whether a path is a checkpoint of one of Lightning's own strategies, or weights alone, and not of this
    engine."""
    return hub_files.is_hub(path) or path.is_file() or _is_sharded(path) or zero.is_zero(path)


def weights_and_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a checkpoint of Lightning's by name, whole and on the CPU, and the rest of its state.

    It may be a `.ckpt` file (one device, DDP, FSDP full), a sharded directory (FSDP), DeepSpeed's, or safetensors. What
    modules keep that is not a tensor is in the state under "extra_state", as in a checkpoint of the engine.

    Raises:
        ValueError: it is something else, is damaged, or can't be read without running code.
    """
    state: dict[str, Any] = {_VERSION: _OF_ANY}
    if hub_files.is_hub(path):
        return hub_files.weights(path), state
    if path.is_file():
        state = read(path)
        named = _own_names(state.pop("state_dict"))
    else:
        named = _own_names(zero.weights(path) if zero.is_zero(path) else _of_shards(path))
    tensors = {name: value.detach() for name, value in named.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in named.items() if name not in tensors}
    first = _first_names(tensors)
    tied = {name: first[name] for name in tensors if first[name] != name}
    weights = {name: value for name, value in tensors.items() if name not in tied}
    return weights, {**state, "extra_state": extra, "names_of_tied": tied}


def read(path: Path) -> dict[str, Any]:
    """Return what a `.ckpt` file of Lightning's holds, with its tensors mapped from the file.

    Raises:
        ValueError: the file is something else, or can't be read without running code.
    """
    state = safe.load(path, mapped=True)
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise ValueError("it has no state_dict; give one of those that a run keeps in its checkpoints/")
    return safe.checked_state({_VERSION: _OF_ANY, **state}, path.name)


def _is_sharded(path: Path) -> bool:
    return (path / "meta.pt").exists() and (path / index.INDEX).exists()


def _of_shards(path: Path) -> dict[str, Tensor]:
    found = index.read(path)
    whole = {
        key: torch.empty_like(tensor, device="cpu")
        for key, tensor in found.tensors().items()
        if key.startswith(("state_dict.", "model."))
    }
    load(whole, storage_reader=found.reader(), no_dist=True)
    return {key.partition(".")[2]: tensor for key, tensor in whole.items()}


def _own_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    named = {own_name(name): value for name, value in state_dict.items()}
    for wrapper in _BEFORE_NAMES:
        if all(name.startswith(wrapper) for name in named):
            named = {name.removeprefix(wrapper): value for name, value in named.items()}
    return named


def _first_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of the same tensor: a tied weight has several."""
    first: dict[tuple[Any, ...], str] = {}
    names = {}
    for name, value in tensors.items():
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        names[name] = first.setdefault(memory, name)
    return names
