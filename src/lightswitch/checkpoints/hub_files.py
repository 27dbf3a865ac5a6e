"""Weights out of safetensors files, alone or as a folder of the Hugging Face hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lightswitch import regular_files
from lightswitch.checkpoints.manifest import is_plain_name

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_hub(path: Path) -> bool:
    """Return whether a path is a file of safetensors, the index of several, or a folder with either."""
    return (path.is_dir() and _in(path) is not None) or path.name.endswith((".safetensors", ".safetensors.index.json"))


def weights(path: Path) -> dict[str, Tensor]:
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
