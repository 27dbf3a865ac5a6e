"""Weights of a checkpoint, exported to files that safetensors, torch or Lightning load without lightswitch.

gpt.safetensors        one file, whatever the size
gpt.safetensors.yaml   the config of the model
gpt.pt, gpt.pt.yaml    the same as a state dict, for `torch.load` and `load_state_dict`
gpt.ckpt, …            the same as a Lightning checkpoint, for `load_from_checkpoint`
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightswitch.checkpoints import directory, format
from lightswitch.checkpoints.reading import BUFFERS, Reader, hub_weights, read_foreign, why
from lightswitch.errors import Refused, UnfitCheckpoint
from lightswitch.regular_files import MARK, remove_tree

FOLDER_STEM = "model"  # of the files in a folder, if only the folder is named
OF_RUN = "model.ckpt"  # in the directory of a run that has ended: its best weights, else its last
OF_TORCH = (".pt", ".ckpt")  # suffixes of files that `torch.save` writes
_ARGUMENTS = "hyper_parameters"
_OF_TRAINING = {
    *("loops", "callbacks", "optimizer_states", "lr_schedulers", "streams", "of_ranks"),
    *("extra_state", "names_of_tied", "frozen_since", "configured", BUFFERS),
}
_PREFIX = "model."


def write(weights: Weights, config: dict[str, Any], file: Path, dtype: torch.dtype | None = None) -> list[Path]:
    """Write weights to a temporary folder, and move the files into place. All weights are in memory at once.

    Args:
        config: the model's config node, written beside the weights.
        file: the path to write, with the suffix .safetensors, .pt or .ckpt.
        dtype: the dtype to round floating-point tensors to; None for their own.

    Returns:
        the files, sorted by name.

    Raises:
        OSError: the disk is full.
        Refused: a value is beyond the range of ``dtype``, or safetensors can't store a module's state or dtype.
    """
    if weights.extra_state and file.suffix == ".safetensors":
        first = next(iter(weights.extra_state))
        raise Refused(f"{first} is not a dense tensor, and safetensors can store only those; use -o NAME.pt")
    tensors = weights.read(weights.like, dtype)
    _check_range(weights, tensors)
    state: dict[str, Any] = tensors
    if file.suffix != ".safetensors":
        others = {other: tensors[first] for other, first in weights.first_names.items()}
        state = {**tensors, **others, **weights.extra_state}
    if file.suffix == ".ckpt":
        state = _as_lightning(state, weights, config)
    with _beside(file) as partial:
        OmegaConf.save(OmegaConf.create(config), partial / config_of(file).name)
        _save(partial / file.name, state)
        with suppress(OSError):  # safetensors makes it owner-readable only; the file system may have no modes
            shutil.copymode(partial / config_of(file).name, partial / file.name)
    return sorted((file, config_of(file)))


def read(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the file that was passed to `write`, and the state dict; None if ``path`` is not an export.

    Raises:
        UnfitCheckpoint: a file can't be read.
    """
    file = path / f"{FOLDER_STEM}.safetensors" if path.is_dir() else path
    file = file.with_name(file.name.removesuffix(".index.json"))
    if file.suffix == ".ckpt" and not config_of(file).is_file():  # not written by this engine
        return None
    if file.suffix not in (".safetensors", *OF_TORCH) or not (file.is_file() or index_of(file).is_file()):
        return None
    try:
        if file.suffix == ".ckpt":
            return file, read_foreign(file)["state_dict"]
        if file.suffix == ".pt":
            return file, _checked(format.load(file))
        return file, hub_weights(file if file.is_file() else index_of(file))
    except Exception as error:  # torch raises many kinds of errors for a file that is not its own, or truncated
        raise UnfitCheckpoint(f"{file} can't be read: {why(error)}") from error


def _as_lightning(state: dict[str, Any], weights: Weights, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Lightning checkpoint without training state.

    For arguments that the module has not saved, it contains the plain values of the config. The caller of
    `load_from_checkpoint` has to pass others, such as an optimizer.
    """
    arguments = {name: value for name, value in config.items() if name[:1] != "_" and _is_plain(value)}
    kept = {name: value for name, value in weights.state.items() if name not in _OF_TRAINING}
    plain = format.PlainTypes(keeps_kinds=False).of({**kept, _ARGUMENTS: arguments | weights.state.get(_ARGUMENTS, {})})
    return {**plain, "state_dict": state}


def _is_plain(value: Any) -> bool:
    """Return whether a config value is passed to a constructor unchanged, without a `_target_` or an interpolation."""
    if isinstance(value, dict):
        return "_target_" not in value and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else not str(value).startswith("${")


def _checked(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError("it is not a state dict")
    return state


def config_of(file: Path) -> Path:
    """Return the path of the model's config for a weight file."""
    return file.with_name(f"{file.name}.yaml")


def index_of(file: Path) -> Path:
    """Return the path of the index of shards for a weight file."""
    return file.with_name(f"{file.name}.index.json")


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved beside ``file`` on exit, unless an exception is raised."""
    partial = directory.make_empty(file.with_name(f"{file.name}.partial"))
    try:
        yield partial
        for path in sorted(partial.iterdir()):
            if path.name != MARK:
                path.replace(file.with_name(path.name))
    finally:
        remove_tree(partial)


def _check_range(weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == weights.like[name].dtype or not (infinite := tensor.isinf()).any():
            continue
        if not weights.read([name])[name].isinf().equal(infinite):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise Refused(f"{name} has values beyond the range of {dtype}; use --dtype float32, or bfloat16")


def _save(path: Path, state: Mapping[str, Any]) -> None:
    try:
        if path.suffix in OF_TORCH:
            with path.open("wb") as file:
                torch.save(state, file)
        else:
            save_file(dict(state), path, metadata={"format": "pt"})  # Hugging Face's libraries require it
    except KeyError as error:  # from safetensors, for a dtype that it does not know
        raise Refused(f"safetensors can't store {error.args[0]}; use -o NAME.pt") from error
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__ or error  # torch has a full disk there
        raise OSError(f"{path.name} can't be written: {reason}") from error
    with path.open("rb") as written:
        os.fsync(written.fileno())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, including NaNs."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


class Weights:
    """Weights of one checkpoint. The constructor compares checksums; tensors are read later.

    Attributes:
        state: the checkpoint without tensors.
        extra_state: entries of the modules' state that are not tensors, by name.
        first_names: the first name of each tied tensor, by its other names: a state dict has all names, a checkpoint
            only the first.
        like: meta tensors by name, with the shapes and dtypes of the stored tensors.

    Raises:
        UnfitCheckpoint: the checkpoint can't be read, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._reader = Reader(path, group=None)
        self.state = self._reader.state
        self.extra_state: dict[str, Any] = self.state.get("extra_state", {})
        names = sorted(self._reader.names(_PREFIX))
        self.like = {name: self._reader.like[_PREFIX + name] for name in names}
        tied: dict[str, str] = self.state.get("names_of_tied", {})
        self.first_names = {other: first for other, first in tied.items() if first in self.like}

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return tensors on the CPU, by name.

        Args:
            dtype: the dtype to round floating-point tensors to, one by one as they are read; None for their own.
        """
        tensors = {
            name: torch.empty_like(self.like[name], dtype=self.dtype(name, dtype), device="cpu") for name in names
        }
        self._reader.fill({_PREFIX + name: tensor for name, tensor in tensors.items()})
        return tensors

    def on_access(self) -> dict[str, Any]:
        """Return the entries of the module's state by name, of which tensors are read on access."""
        return self._reader.weights()

    def dtype(self, name: str, asked: torch.dtype | None) -> torch.dtype:
        """Return the dtype of a tensor once it is rounded to the requested one; only floating-point tensors change."""
        saved = self.like[name].dtype
        return asked if asked is not None and saved.is_floating_point else saved
