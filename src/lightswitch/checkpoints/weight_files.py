"""Weights of a checkpoint, exported to files that safetensors, torch or Lightning load without lightswitch.

gpt.safetensors        one file, whatever the size
gpt.safetensors.yaml   the config of the model
gpt.pt, gpt.pt.yaml    the same as a state dict, for `torch.load` and `load_state_dict`
gpt.ckpt, …            the same as a Lightning checkpoint, for `load_from_checkpoint`
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightswitch.checkpoints import directory, format
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import Refused
from lightswitch.regular_files import MARK, remove_tree, to_disk

OF_RUN = "model.ckpt"  # in the directory of a run that has ended: its best weights, else its last
_ARGUMENTS = "hyper_parameters"
_OF_TRAINING = {
    *("loops", "callbacks", "optimizer_states", "lr_schedulers", "streams", "of_ranks"),
    *("extra_state", "names_of_tied", "frozen_since", "configured", "buffers"),  # the last of earlier versions
}


def write(reader: Reader, config: dict[str, Any], file: Path, dtype: torch.dtype | None = None) -> list[Path]:
    """Write the weights of a checkpoint to a temporary folder, and move the files into place.

    All weights are in memory at once.

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
    extra, tied = (reader.state.get(key, {}) for key in ("extra_state", "names_of_tied"))
    if extra and file.suffix == ".safetensors":
        raise Refused(
            f"{next(iter(extra))} is not a dense tensor, and safetensors can store only those; use -o NAME.pt"
        )
    state: dict[str, Any] = {
        name: _rounded(name, reader.read(f"model.{name}"), dtype) for name in sorted(reader.weights_like)
    }
    if file.suffix != ".safetensors":
        state |= {other: state[first] for other, first in tied.items() if first in state} | extra
    if file.suffix == ".ckpt":
        state = _as_lightning(state, reader.state, config)
    with _beside(file) as partial:
        OmegaConf.save(OmegaConf.create(config), partial / config_of(file).name)
        _save(partial / file.name, state)
        with suppress(OSError):  # safetensors makes it owner-readable only; the file system may have no modes
            shutil.copymode(partial / config_of(file).name, partial / file.name)
    return sorted((file, config_of(file)))


def _as_lightning(state: dict[str, Any], of_run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Lightning checkpoint without training state.

    For arguments that the module has not saved, it contains the plain values of the config. The caller of
    `load_from_checkpoint` has to pass others, such as an optimizer.
    """
    arguments = {name: value for name, value in config.items() if name[:1] != "_" and _is_plain(value)}
    kept = {name: value for name, value in of_run.items() if name not in _OF_TRAINING}
    plain = format.PlainTypes(keeps_kinds=False).of({**kept, _ARGUMENTS: arguments | of_run.get(_ARGUMENTS, {})})
    return {**plain, "state_dict": state}


def _is_plain(value: Any) -> bool:
    """Return whether a config value is passed to a constructor unchanged, without a `_target_` or an interpolation."""
    if isinstance(value, dict):
        return "_target_" not in value and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else not str(value).startswith("${")


def config_of(path: Path) -> Path:
    """Return the path of the model's config for a file of weights, or for a folder with one."""
    file = path / "model.safetensors" if path.is_dir() else path
    return file.with_name(f"{file.name.removesuffix('.index.json')}.yaml")


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


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating-point tensor in a dtype; any other tensor, and one of no requested dtype, unchanged."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    rounded = tensor.to(dtype)
    if not rounded.isinf().equal(tensor.isinf()):
        what = str(dtype).removeprefix("torch.")
        raise Refused(f"{name} has values beyond the range of {what}; use --dtype float32, or bfloat16")
    return rounded


def _save(path: Path, state: Mapping[str, Any]) -> None:
    try:
        if path.suffix != ".safetensors":
            format.save(path, state)
        else:
            save_file(dict(state), path, metadata={"format": "pt"})  # Hugging Face's libraries require it
    except KeyError as error:  # from safetensors, for a dtype that it does not know
        raise Refused(f"safetensors can't store {error.args[0]}; use -o NAME.pt") from error
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path.name} can't be written: {error}") from error
    to_disk(path)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, including NaNs."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
