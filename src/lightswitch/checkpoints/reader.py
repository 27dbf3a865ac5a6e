"""Reading the tensors of a checkpoint into those of a live model, however either is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightswitch.checkpoints import directory, foreign
from lightswitch.refused import Refused


class UnfitCheckpoint(Refused):
    """A checkpoint that can't be read, or that isn't one of this model and optimizer."""


class Reader:
    """Of one checkpoint.

    Args:
        path: a directory of `directory.write`, or what Lightning's own strategies write, of which the weights alone are
            read.
        group: of the ranks that read together; None for one process.
    """

    def __init__(self, path: Path, group: dist.ProcessGroup | None) -> None:
        self.path = path
        self._group = group
        self._loaded: dict[str, Tensor] = {}
        if foreign.is_foreign(path):
            weights, self.state = foreign.weights_and_state(path)
            self._loaded = {f"model.{name}": value for name, value in weights.items()}
            self.shapes = {name: value.shape for name, value in self._loaded.items()}
        else:
            self.state = directory.read_state(path)
            metadata = FileSystemReader(path).read_metadata().state_dict_metadata
            stored = {name: item for name, item in metadata.items() if isinstance(item, TensorStorageMetadata)}
            self.shapes = {name: item.size for name, item in stored.items()}
            self._dtypes = {name: item.properties.dtype for name, item in stored.items()}

    def names(self, prefix: str) -> set[str]:
        """Of the tensors that begin so, less the prefix."""
        return {name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read each tensor in place, a DTensor its own part only. Collective."""
        if not self._loaded:
            reader = FileSystemReader(self.path)
            load(dict(tensors), storage_reader=reader, process_group=self._group, no_dist=self._group is None)
            return
        for name, tensor in tensors.items():
            with torch.no_grad():
                tensor.copy_(_spread_like(tensor, self._loaded[name]))

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        if self._loaded:
            return self._loaded[name]
        whole = {name: torch.empty(self.shapes[name], dtype=self._dtypes[name])}
        load(whole, storage_reader=FileSystemReader(self.path), no_dist=True)
        return whole[name]

    def check_model(self, live: Mapping[str, Any], strict: bool) -> None:
        """
        Raises:
            UnfitCheckpoint: names or shapes of the parameters differ.
        """
        saved = self.names("model.")
        problems = [f"{name} has {_shape(self.shapes[f'model.{name}'])} in it and {_shape(value.shape)} in the model"
                    for name, value in live.items()
                    if name in saved and tuple(self.shapes[f"model.{name}"]) != tuple(value.shape)]  # fmt: skip
        if strict:
            problems += [f"it has no {name}" for name in sorted(live.keys() - saved)]
            problems += [f"the model has no {name}" for name in sorted(saved - live.keys())]
        if problems:
            raise UnfitCheckpoint(
                f"{self.path} is of another model: {_several(problems)}; give the model the arguments it had, "
                "or start anew under another run_id"
            )


def _spread_like(tensor: Tensor, whole: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(tensor, DTensor):
        return whole
    # every rank has read the whole: none is to be sent
    return distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def _shape(size: torch.Size) -> str:
    return "×".join(map(str, size)) or "a number"


def _several(problems: list[str], shown: int = 4) -> str:
    more = f" (and {len(problems) - shown} more)" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more
