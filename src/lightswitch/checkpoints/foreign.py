"""Weights out of files that this engine has not written: safetensors, and what Lightning's own strategies write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lightswitch import regular_files
from lightswitch.checkpoints import safe
from lightswitch.checkpoints.manifest import is_plain_name
from lightswitch.checkpoints.names import own_name

_VERSION, _OF_ANY = "pytorch-lightning_version", "2.0.0"  # a Trainer migrates older ones
_BEFORE_NAMES = ("_forward_module.", "module.")  # DeepSpeed's and DDP's wrappers
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FSDP, _ZERO = "meta.pt", "checkpoint/*_model_states.pt"  # what Lightning's sharded directories have


def is_foreign(path: Path) -> bool:
    """Return whether a path is a file of one of Lightning's own strategies, or weights alone, and not of this engine.

    Raises:
        ValueError: it is a directory of theirs: what converts it is named.
    """
    if (path / _FSDP).exists():
        converter = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} {path}.whole"
        raise ValueError(f"it is a sharded one of Lightning's; type {converter}, and give {path.name}.whole")
    if any(path.glob(_ZERO)):
        function = "convert_zero_checkpoint_to_fp32_state_dict"
        code = f"from lightning.pytorch.utilities.deepspeed import {function} as to; to('{path}', '{path}.whole')"
        raise ValueError(f'it is DeepSpeed\'s; type python -c "{code}", and give {path.name}.whole')
    return is_hub(path) or path.is_file()


def weights_and_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a checkpoint of Lightning's by name, whole and on the CPU, and the rest of its state.

    It may be a `.ckpt` file (one device, DDP, FSDP full) or safetensors. What modules keep that is not a tensor is in
    the state under "extra_state", as in a checkpoint of the engine.

    Raises:
        ValueError: it is something else, is damaged, or can't be read without running code.
    """
    if is_hub(path):
        return hub_weights(path), {_VERSION: _OF_ANY}
    state = read(path)
    named = _own_names(state.pop("state_dict"))
    tensors = {name: value.detach() for name, value in named.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in named.items() if name not in tensors}
    first = _first_names(tensors)
    tied = {name: first[name] for name in tensors if first[name] != name}
    weights = {name: value for name, value in tensors.items() if name not in tied}
    return weights, {**state, "extra_state": extra, "names_of_tied": tied}


def read(path: Path) -> dict[str, Any]:
    """Return what a `.ckpt` file of Lightning's holds, with its tensors mapped from the file.

    Of a sharded directory of its FSDP, torch's converter has made a file that calls the weights "model".

    Raises:
        ValueError: the file is something else, or can't be read without running code.
    """
    state = safe.load(path, mapped=True)
    if isinstance(state, dict) and "state_dict" not in state and "model" in state:
        state["state_dict"] = state.pop("model")
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise ValueError("it has no state_dict; give one of those that a run keeps in its checkpoints/")
    return safe.checked_state({_VERSION: _OF_ANY, **state}, path.name)


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


def is_hub(path: Path) -> bool:
    """Return whether a path is a file of safetensors, the index of several, or a folder with either."""
    return (path.is_dir() and _in(path) is not None) or path.name.endswith((".safetensors", ".safetensors.index.json"))


def hub_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors by the names in the files, on the CPU, each mapped from its file.

    Raises:
        ValueError: the index names a file elsewhere, or is none.
        OSError, SafetensorError: a file can't be read, or is a pipe or a device.
    """
    file = _in(path) or path
    if file.suffix != ".json":
        return load_file(regular_files.check(file))
    index: Any = regular_files.read_json(file)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{file.name} is not an index of safetensors")
    if outside := next((name for name in shards.values() if not is_plain_name(name)), None):
        raise ValueError(f"{file.name} names a file outside of its folder: {outside}")
    files = [regular_files.check(file.parent / shard) for shard in sorted(set(shards.values()))]
    found = {name: value for shard in files for name, value in load_file(shard).items()}
    if missing := sorted(shards.keys() - found.keys()):
        raise ValueError(f"{file.name} names {missing[0]}, which its files lack")
    return found


def _in(folder: Path) -> Path | None:
    return next((folder / name for name in (_FILE, _INDEX) if (folder / name).is_file()), None)
