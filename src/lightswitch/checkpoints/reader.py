"""Reading the tensors of a checkpoint into those of a live model, however either is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from lightswitch.checkpoints import directory, foreign
from lightswitch.refused import Refused

Told = Callable[[int], None]  # takes the number of bytes that were just read


class UnfitCheckpoint(Refused):
    """A checkpoint that can't be read, or that isn't one of this model and optimizer."""


class Reader:
    """Of one checkpoint, whose checksums are compared first.

    Args:
        path: a directory of `directory.write`, or what Lightning's own strategies write, of which the weights alone are
            read.
        group: of the ranks that read together; None for one process.

    Raises:
        UnfitCheckpoint: on every rank, when it can't be read or isn't what was written.
    """

    def __init__(self, path: Path, group: dist.ProcessGroup | None) -> None:
        self.path = path
        self._group = group
        self._loaded: dict[str, Tensor] = {}
        if not foreign.is_foreign(path) and (found := directory.damage(path, group)) is not None:
            raise unreadable(path, found)
        try:
            self.state = self._open()
        except Exception as error:  # torch raises many kinds for what is no checkpoint, or a part of one
            raise unreadable(path, error) from error

    def _open(self) -> dict[str, Any]:
        if foreign.is_foreign(self.path):
            weights, state = foreign.weights_and_state(self.path)
            self._loaded = {f"model.{name}": value for name, value in weights.items()}
            self.like = {name: value.to("meta") for name, value in self._loaded.items()}
            return state
        self.like = directory.tensors(self.path)
        return directory.read_state(self.path)

    def names(self, prefix: str) -> set[str]:
        """Of the tensors that begin so, less the prefix."""
        return {name.removeprefix(prefix) for name in self.like if name.startswith(prefix)}

    def fill(self, tensors: Mapping[str, Tensor], told: Told | None = None) -> None:
        """Read each tensor in place, a DTensor its own part only. Collective."""
        if not self._loaded:
            reader, planner = FileSystemReader(self.path), _Planner(told)
            alone = self._group is None
            load(dict(tensors), storage_reader=reader, planner=planner, process_group=self._group, no_dist=alone)
            return
        for name, tensor in tensors.items():
            with torch.no_grad():
                tensor.copy_(_spread_like(tensor, self._loaded[name]))
            if told is not None:
                told(tensor.nbytes)

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        if self._loaded:
            return self._loaded[name]
        whole = {name: torch.empty_like(self.like[name], device="cpu")}
        load(whole, storage_reader=FileSystemReader(self.path), no_dist=True)
        return whole[name]

    def check_model(self, live: Mapping[str, Any], arguments: Mapping[str, Any], strict: bool) -> None:
        """
        Args:
            live: the model's state by name.
            arguments: those that it was built with, as far as it has saved them.

        Raises:
            UnfitCheckpoint: names or shapes of the parameters differ.
        """
        saved = self.names("model.")
        problems = [f"{name} has {_shape(self.like[f'model.{name}'])} in it and {_shape(value)} in the model"
                    for name, value in live.items()
                    if name in saved and self.like[f"model.{name}"].shape != value.shape]  # fmt: skip
        if strict:
            problems += [f"it has no {name}" for name in sorted(live.keys() - saved)]
            problems += [f"the model has no {name}" for name in sorted(saved - live.keys())]
        if problems:
            raise UnfitCheckpoint(
                f"{self.path} is of another model: {_several([*self._other_arguments(arguments), *problems])}; "
                "give the model the arguments it had, or start anew under another run_id"
            )

    def _other_arguments(self, arguments: Mapping[str, Any]) -> list[str]:
        saved = self.state.get("hyper_parameters", {})
        return [
            f"model.{name} was {saved[name]}, is {value}"
            for name, value in arguments.items()
            if name in saved and str(saved[name]) != str(value) and "${" not in str(saved[name])  # from the environment
        ]


def unreadable(path: Path, why: str | Exception) -> UnfitCheckpoint:
    told = str(why).partition("\n")[0] or type(why).__name__
    return UnfitCheckpoint(f"{shown(path)} can't be read as a checkpoint: {told}")


def shown(path: Path) -> str:
    """Relative where it lies below the working directory: as it can be pasted."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class _Planner(DefaultLoadPlanner):
    """Tells of each tensor, or part of one, when it has been read."""

    def __init__(self, told: Told | None) -> None:
        super().__init__()
        self._told = told

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if self._told is not None:
            self._told(tensor.nbytes)


def _spread_like(tensor: Tensor, whole: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(tensor, DTensor):
        return whole
    # every rank has read the whole: none is to be sent
    return distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _several(problems: list[str], shown: int = 4) -> str:
    more = f" (and {len(problems) - shown} more)" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more
