"""The weights of a model in a checkpoint, read in one process whatever wrote them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from lightswitch.checkpoints import directory
from lightswitch.checkpoints.find import position_of
from lightswitch.checkpoints.names import own_name
from lightswitch.checkpoints.reader import UnfitCheckpoint

Told = Callable[[int], None]  # takes the number of bytes that were just read

_PREFIX = "model."


class Weights:
    """Of one checkpoint, a directory or a file of Lightning's. Its checksums are compared at once, tensors read later.

    Raises:
        UnfitCheckpoint: it can't be read, or it isn't what was written.
    """

    def __init__(self, path: Path) -> None:
        position_of(path, thoroughly=True)
        self.path = path
        self._mapped: dict[str, Tensor] = {}
        if path.is_dir():
            self.state = directory.read_state(path)
            self.extra_state: dict[str, Any] = self.state.get("extra_state", {})
            self.like = _stored(path)
        else:
            self.state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            self._mapped, self.extra_state = _of_lightning(path, self.state)
            self.like = {name: value.to("meta") for name, value in self._mapped.items()}
        self.like = dict(sorted(self.like.items()))  # tensors without values: shapes and dtypes

    def read(
        self, names: Iterable[str], dtype: torch.dtype | None = None, told: Told | None = None
    ) -> dict[str, Tensor]:
        """On the CPU. With a dtype, floating-point tensors are rounded to it one by one as they are read."""
        tensors = {
            name: torch.empty_like(self.like[name], dtype=self.dtype(name, dtype), device="cpu") for name in names
        }
        if self.path.is_dir():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads, as meant
                load(
                    {_PREFIX + name: tensor for name, tensor in tensors.items()},
                    storage_reader=FileSystemReader(self.path),
                    planner=_Planner(told),
                    no_dist=True,
                )
        else:
            for name, tensor in tensors.items():
                tensor.copy_(self._mapped[name])
                if told is not None:
                    told(tensor.nbytes)
        return tensors

    def dtype(self, name: str, asked: torch.dtype | None) -> torch.dtype:
        saved = self.like[name].dtype
        return asked if asked is not None and saved.is_floating_point else saved


class _Planner(DefaultLoadPlanner):
    def __init__(self, told: Told | None) -> None:
        super().__init__()
        self._told = told

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if self._told is not None:
            self._told(tensor.nbytes)


def _stored(path: Path) -> dict[str, Tensor]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name.removeprefix(_PREFIX): torch.empty(item.size, dtype=item.properties.dtype, device="meta")
        for name, item in metadata.items()
        if name.startswith(_PREFIX) and isinstance(item, TensorStorageMetadata)
    }


def _of_lightning(path: Path, state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, each once, under the first of its names; and what else the modules keep."""
    if not isinstance(state.get("state_dict"), dict):
        raise UnfitCheckpoint(f"{path} can't be read as a checkpoint: it has no state_dict")
    tensors, extra = {}, {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in state.pop("state_dict").items():
        if not isinstance(value, Tensor):
            extra[own_name(name)] = value
            continue
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or memory not in seen:
            tensors[own_name(name)] = value
        seen.add(memory)
    return tensors, extra
