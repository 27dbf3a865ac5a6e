"""Reading of tensors from checkpoints and foreign files into a live model, whatever the sharding of either."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn

from lightswitch import regular_files
from lightswitch.checkpoints import directory, format, names
from lightswitch.checkpoints.format import Index, Shard
from lightswitch.checkpoints.names import is_stored, own_name
from lightswitch.checkpoints.shards import Stored, boxes, local, sharded_like
from lightswitch.checkpoints.writing import why
from lightswitch.collectives import of_ranks
from lightswitch.errors import UnfitCheckpoint, listed, shown

_REPLACED = "a run in progress replaced or removed it during the read; try again"
_BRINGS = "the module brings these weights itself, set self.strict_loading = False in it"
_OF_A_RESUME = "use the model arguments that it was saved with, or start a new run with another run_id"


class Reader:
    """Reader of one checkpoint. It compares the checksums first.

    Args:
        path: a directory that `directory.write` has written, a `.ckpt` file of Lightning, or weights in safetensors or
            in a `.pt` file. Of all but the first, only the weights are available as tensors.
        group: the process group of the ranks that read together; None for a single process.
        advice: what to do if the model differs, for the error.
        live: the model's parameters by name: what was sharded is sharded like them again.
        compares_tensors: compare the checksums of the files of tensors, too.

    Attributes:
        state: the checkpoint without the tensors.
        like: meta tensors by name, with the shapes and dtypes of the stored tensors.

    Raises:
        UnfitCheckpoint: on every rank, if the checkpoint can't be read or is damaged.
    """

    _index: Index

    def __init__(
        self,
        path: Path,
        group: dist.ProcessGroup | None,
        advice: str = _OF_A_RESUME,
        live: Mapping[str, nn.Parameter] | None = None,
        compares_tensors: bool = True,
    ) -> None:
        self.path = path = regular_files.linked(path)
        self.advice = advice
        self._live = live or {}
        self._files = path.resolve()  # a link such as last.ckpt may change during the read
        self._identity = directory.identity(self._files)
        self._group = group
        self._compares_tensors = compares_tensors
        self._saved_names: dict[str, str] = {}  # of weights that `rename` has given other names
        problem: Exception | None = None
        try:
            self.state = self._open()
        except Exception as error:  # torch raises many kinds of errors for other files
            problem = error
        if message := _first_of_all_ranks(self._replaced() or (why(problem) if problem else None), group):
            raise unreadable(path, message) from problem

    def _open(self) -> dict[str, Any]:
        """Read index and state. Each rank compares the checksums of some files, without waiting for another rank."""
        if is_foreign(self.path):
            weights, state = weights_and_state(self.path)
            self._take(weights)
            return state
        rank, ranks = (dist.get_rank(self._group), dist.get_world_size(self._group)) if self._group else (0, 1)
        self._index = directory.read_index(
            self._files, slice(rank, None, ranks) if self._compares_tensors else slice(0)
        )
        self.like = dict(self._index.like)
        return directory.read_state(self._files, partial(sharded_like, self._live))

    @property
    def is_foreign(self) -> bool:
        """Whether only the weights can be used, also of an export, which has other entries of the checkpoint."""
        return isinstance(self._index, LoadedIndex)

    def _replaced(self) -> str | None:
        return None if directory.identity(self._files) == self._identity else _REPLACED

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Give the weights other names, by a function of their names; other tensors keep theirs."""
        self._saved_names = {f"model.{renamed(name)}": f"model.{name}" for name in self.names("model.")}
        others = {name: like for name, like in self.like.items() if not name.startswith("model.")}
        self.like = {**others, **{name: self.like[saved] for name, saved in self._saved_names.items()}}

    def take(self, translate: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        """Replace the weights of a foreign file by the result of a function of them, by name."""
        assert isinstance(self._index, LoadedIndex)
        self._take(translate({name: self._index.values[f"model.{name}"] for name in self.names("model.")}))

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        loaded = {f"model.{name}": value for name, value in weights.items()}
        self.like = {name: value.to("meta") for name, value in loaded.items()}
        shards = {name: [Shard(name, (0,) * one.dim(), tuple(one.shape), "", 0, 0)] for name, one in loaded.items()}
        self._index = LoadedIndex(self.path, dict(self.like), shards, loaded)

    def names(self, prefix: str) -> set[str]:
        """Return the names of the tensors with a prefix, without the prefix."""
        return {name.removeprefix(prefix) for name in self.like if name.startswith(prefix)}

    def weights(self) -> dict[str, Any]:
        """Return the entries of the module's state under all their names, of which tensors are read on access."""
        own: dict[str, Any] = {name: partial(self.read, f"model.{name}") for name in self.weights_like}
        tied = self.state.get("names_of_tied", {}).items()
        own |= {name: own[first] for name, first in tied if first in own}
        return _ReadOnAccess({**own, **self.state.get("extra_state", {})})  # type: ignore[return-value]  # is used as one

    def read_weights(self) -> dict[str, Tensor]:
        """Return the weights on the CPU, by their first names."""
        return {name: self.read(f"model.{name}") for name in self.weights_like}

    @property
    def weights_like(self) -> dict[str, Tensor]:
        """Meta tensors of the weights, by name."""
        return {name.removeprefix("model."): like for name, like in self.like.items() if name.startswith("model.")}

    def fill(self, tensors: Mapping[str, Stored]) -> None:
        """Read tensors in place; of a DTensor or Piece, only this rank's shard. Collective.

        Each rank reads the rows that it needs of the stored shards.

        Args:
            tensors: by the names in the checkpoint, with the shapes there.

        Raises:
            UnfitCheckpoint: on every rank, if a file can't be read, differs from the index, or was replaced during the
                read.
        """
        self._read_into(tensors, self._group)

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU."""
        whole = torch.empty_like(self.like[name], device="cpu")
        self._read_into({name: whole}, None)
        return whole

    def _read_into(self, tensors: Mapping[str, Stored], group: dist.ProcessGroup | None) -> None:
        problem, message = None, None
        try:
            for name, tensor in tensors.items():
                _fill(self._saved_names.get(name, name), tensor, self._index)
        except Exception as error:  # torch raises many kinds of errors for a damaged file
            problem = error
            message = f"rank {dist.get_rank(group) if group else 0}: {why(error)}"
        if message := _first_of_all_ranks(self._replaced() or message, group):
            raise unreadable(self.path, message) from problem

    def check_model(self, module: LightningModule, live: Mapping[str, Any], strict: bool) -> set[str]:
        """Compare a model's state with the checkpoint's: the shapes of parameters, and all names.

        Modules load what is no parameter by their own code, which may change shapes, and take a tensor for another
        value. The error names differences in the arguments of the constructor first.

        Args:
            live: the model's state by name, without what the checkpoint leaves out.
            strict: require the same names on both sides.

        Returns:
            the names of the parameters in the state.

        Raises:
            UnfitCheckpoint: names or shapes differ.
        """
        saved, extra = self.names("model."), self.state.get("extra_state", {})
        parameters = names.parameters(module).keys() & live.keys()
        common = parameters & saved
        problems = [
            f"{name} is {_shape(self.like[f'model.{name}'])} in the checkpoint and {_shape(value)} in the model"
            for name, value in live.items()
            if name in common and self.like[f"model.{name}"].shape != value.shape
        ]
        if strict:
            lacks = {name for name, value in live.items() if is_stored(value)} - saved - extra.keys()
            problems += [f"the checkpoint has no {name}" for name in sorted(lacks)]
            problems += [f"the model has no {name}" for name in sorted(saved - {*live, *names.tied(module)})]
        if problems:
            then = self.state.get("hyper_parameters", {})
            others = [
                f"model.{name} was {then[name]}, is {value}"
                for name, value in module.hparams.items()
                if name in then and str(then[name]) != str(value) and "${" not in str(then[name])  # of the environment
            ]
            message = listed([*others, *problems], shown=4, separator="; ")
            advice = self.advice + (f", or, if {_BRINGS}" if strict and lacks else "")
            raise UnfitCheckpoint(f"{self.path} was saved from a different model: {message}; {advice}")
        return parameters


@dataclass(frozen=True)
class LoadedIndex(Index):
    """Index of a foreign file's tensors, which are in memory, or mapped into it."""

    values: Mapping[str, Tensor]

    def read(self, shard: Shard, box: tuple[slice, ...]) -> Tensor:
        return self.values[shard.name][box]


class _ReadOnAccess(UserDict[str, Any]):
    """Dict whose values are read when they are accessed."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value() if isinstance(value, partial) else value


def unreadable(path: Path, reason: str) -> UnfitCheckpoint:
    """Return the error for a checkpoint that can't be read."""
    return UnfitCheckpoint(f"{shown(path)} can't be read as a checkpoint: {reason}")


@torch.no_grad()
def _fill(name: str, tensor: Stored, index: Index) -> None:
    """Read the elements of a tensor that this rank holds, in place."""
    if name not in index.like or index.like[name].shape != tensor.shape:
        there = _shape(index.like[name]) if name in index.like else "missing"
        raise ValueError(f"{name} is {there}, expected {_shape(tensor)}")
    for offsets, values in boxes(tensor):
        for shard in index.shards[name]:
            sides = [*zip(shard.offsets, shard.sizes, offsets, values.shape, strict=True)]
            common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]
            if all(begin < end for begin, end in common):
                values[_within(common, offsets)].copy_(index.read(shard, _within(common, shard.offsets)))


def _within(box: Iterable[tuple[int, int]], offsets: Iterable[int]) -> tuple[slice, ...]:
    """Return a box of the whole tensor, with the begin and end of each dimension, as a box of a shard."""
    return tuple(slice(begin - offset, end - offset) for (begin, end), offset in zip(box, offsets, strict=True))


def _first_of_all_ranks(problem: str | None, group: dist.ProcessGroup | None) -> str | None:
    return problem if group is None else next(filter(None, of_ranks(problem, group)), None)


def _shape(tensor: Stored) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"


# Files from elsewhere

_VERSION, _OF_ANY = "pytorch-lightning_version", "2.0.0"  # a Trainer migrates checkpoints of older versions
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FSDP, _ZERO = "meta.pt", "checkpoint/*_model_states.pt"  # files in Lightning's sharded checkpoint directories


def is_foreign(path: Path) -> bool:
    """Return whether a path is a checkpoint file of Lightning or a file of weights, not a checkpoint of this engine.

    Raises:
        ValueError: it is a sharded directory of Lightning or DeepSpeed; the message names the converter.
    """
    if (path / _FSDP).exists():
        converter = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} {path}.whole"
        raise ValueError(f"it is a sharded checkpoint of Lightning; type {converter}, and use {path.name}.whole")
    if any(path.glob(_ZERO)):
        function = "convert_zero_checkpoint_to_fp32_state_dict"
        code = f"from lightning.pytorch.utilities.deepspeed import {function} as to; to('{path}', '{path}.whole')"
        raise ValueError(f'it is a DeepSpeed checkpoint; type python -c "{code}", and use {path.name}.whole')
    return is_hub(path) or path.is_file()


def weights_and_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a foreign checkpoint by name, whole and on the CPU, and the rest of its state.

    It is a `.ckpt` file of Lightning (one device, DDP, FSDP full), a state dict in a `.pt` file, or safetensors. Its
    tensors are mapped into memory. In a file that torch's converter has made from a sharded FSDP directory, the weights
    are under "model". Values of the modules' state that are no tensors are in the state under "extra_state", as in a
    checkpoint of the engine.

    Raises:
        ValueError: it is something else, is damaged, or can't be read without running code.
    """
    if is_hub(path):
        return hub_weights(path), {_VERSION: _OF_ANY}
    state = format.load(path, mapped=True)
    if isinstance(state, dict) and "state_dict" not in state:
        if path.suffix == ".pt" and "model" not in state:
            state = {"state_dict": state}
        else:
            state["state_dict"] = state.pop("model", None)
    weights = state.pop("state_dict") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ValueError("it has no state_dict; use a checkpoint from the checkpoints/ folder of a run, or safetensors")
    named = {own_name(name): value for name, value in weights.items()}
    tensors = {name: local(value) for name, value in named.items() if is_stored(value)}
    extra = {name: value for name, value in named.items() if name not in tensors}
    return tensors, {_VERSION: _OF_ANY, **state, "extra_state": extra}


def is_hub(path: Path) -> bool:
    """Return whether a path is a safetensors file, an index of several, or a folder with either."""
    return (path.is_dir() and _in(path) is not None) or path.name.endswith((".safetensors", ".safetensors.index.json"))


def hub_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of safetensors files by name, on the CPU, memory-mapped from the files.

    Raises:
        ValueError: the index is invalid, or names a tensor that its files lack.
        OSError, SafetensorError: a file can't be read.
    """
    file = _in(path) or path
    if file.suffix != ".json":
        return load_file(file)
    index: Any = regular_files.read_json(file)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{file.name} is not an index of safetensors")
    files = [file.parent / shard for shard in sorted(set(shards.values()))]
    found = {name: value for shard in files for name, value in load_file(shard).items()}
    if missing := sorted(shards.keys() - found.keys()):
        raise ValueError(f"{file.name} names {missing[0]}, which is in none of its files")
    return found


def _in(folder: Path) -> Path | None:
    return next((folder / name for name in (_FILE, _INDEX) if (folder / name).is_file()), None)
