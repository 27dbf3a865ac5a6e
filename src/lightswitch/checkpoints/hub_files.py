"""Weights out of safetensors files, alone or as a folder of the Hugging Face hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_hub(path: Path) -> bool:
    """Return whether a path is a file of safetensors, the index of several, or a folder with either."""
    return (path.is_dir() and _in(path) is not None) or path.name.endswith((".safetensors", ".safetensors.index.json"))


def weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors by the names in the files, on the CPU, each mapped from its file.

    Raises:
        ValueError: the index names a file elsewhere, or is none.
        OSError, SafetensorError: a file can't be read.
    """
    file = _in(path) or path
    if file.suffix != ".json":
        return load_file(file)
    index: Any = json.loads(file.read_text(encoding="utf-8"))
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{file.name} is not an index of safetensors")
    if outside := next((name for name in shards.values() if Path(name).name != name), None):
        raise ValueError(f"{file.name} names a file outside of its folder: {outside}")
    found = {
        name: value for shard in sorted(set(shards.values())) for name, value in load_file(file.parent / shard).items()
    }
    if missing := sorted(shards.keys() - found.keys()):
        raise ValueError(f"{file.name} names {missing[0]}, which its files lack")
    return found


def _in(folder: Path) -> Path | None:
    return next((folder / name for name in (_FILE, _INDEX) if (folder / name).is_file()), None)
