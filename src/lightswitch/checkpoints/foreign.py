"""Weights out of the checkpoints that Lightning's own strategies write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from lightswitch.checkpoints import directory
from lightswitch.checkpoints.names import own_name

_VERSION, _OF_ANY = "pytorch-lightning_version", "2.0.0"  # a Trainer migrates older ones
_BEFORE_NAMES = ("_forward_module.", "module.")  # DeepSpeed's and DDP's wrappers


def is_foreign(path: Path) -> bool:
    return path.is_file() or _is_sharded(path) or _is_zero(path)


def weights_and_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of a `.ckpt` file (one device, DDP, FSDP full), a sharded directory (FSDP) or DeepSpeed's; whole, on the CPU.

    What modules keep that is no tensor stands in the state under "extra_state", as in a checkpoint of ours.
    """
    state: dict[str, Any] = {_VERSION: _OF_ANY}
    if path.is_file():
        state = read(path)
        named = _own_names(state.pop("state_dict"))
    else:
        named = _own_names(_of_zero(path) if _is_zero(path) else _of_shards(path))
    tensors = {name: value.detach() for name, value in named.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in named.items() if name not in tensors}
    return _first_names(tensors), {**state, "extra_state": extra}


def read(path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: the file is something else.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if "state_dict" not in state:
        raise ValueError("it has no state_dict; give one of those that a run keeps in its checkpoints/")
    return {_VERSION: _OF_ANY, **state}


def _is_sharded(path: Path) -> bool:
    return (path / "meta.pt").exists() and (path / ".metadata").exists()


def _is_zero(path: Path) -> bool:
    return any(path.glob("checkpoint/*_model_states.pt"))


def _of_shards(path: Path) -> dict[str, Tensor]:
    whole = {
        key: torch.empty_like(tensor, device="cpu")
        for key, tensor in directory.tensors(path).items()
        if key.startswith(("state_dict.", "model."))
    }
    load(whole, storage_reader=FileSystemReader(path), no_dist=True)
    return {key.partition(".")[2]: tensor for key, tensor in whole.items()}


def _of_zero(path: Path) -> dict[str, Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="checkpoint")
    return weights


def _own_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    named = {own_name(name): value for name, value in state_dict.items()}
    for wrapper in _BEFORE_NAMES:
        if all(name.startswith(wrapper) for name in named):
            named = {name.removeprefix(wrapper): value for name, value in named.items()}
    return named


def _first_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a tied weight, which has several."""
    first: dict[tuple[Any, ...], str] = {}
    for name, value in tensors.items():
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        first.setdefault(memory, name)
    return {name: tensors[name] for name in first.values()}
