"""State in types that `torch.load(weights_only=True)` reads: a checkpoint from elsewhere runs no code.

This is the one place of the engine that reads what `torch.save` has written.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_MOST_LEVELS = 64  # of mappings and lists in one another
_STATE: dict[str, type] = {  # what a checkpoint holds, if it does
    **dict.fromkeys(("epoch", "global_step"), int),
    **dict.fromkeys(("loops", "callbacks", "hyper_parameters", "extra_state", "names_of_tied"), dict),
    **dict.fromkeys(("frozen_since", "plateau", "epoch_end"), dict),
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "left_out", "streams", "of_ranks", "places_of_shards"), list),
    "pytorch-lightning_version": str,
}
_KEPT = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)


class UnsafeFile(ValueError):
    """Error of a file that `torch.load` can't read, or not without calling what the file names."""


def load(path: Path, mapped: bool = False) -> Any:
    """Return what `torch.save` has written, on the CPU, in whichever of its formats.

    Args:
        mapped: tensors are read from the file when they are used, where its format allows it.

    Raises:
        UnsafeFile: with the reason, such as what it names that would run code.
    """
    if not path.is_file():  # a pipe would be waited for
        raise UnsafeFile(f"{path.name} is not a regular file")
    try:
        if is_zip := _is_zip(path):
            check_zip(path, path.stat().st_size, path.name)
        found = torch.load(path, map_location="cpu", mmap=mapped and is_zip, weights_only=True)
        _check_sizes(found, path)
        return found
    except UnsafeFile:
        raise
    except OSError as error:
        raise UnsafeFile(f"{path.name} can't be read: {error.strerror}") from error
    except Exception as error:  # torch raises many kinds for what is no file of its own, or a part of one
        raise UnsafeFile(_why(path, error)) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_zip(file: Any, most_bytes: int, name: str) -> None:
    """Check that an archive's files are no larger than it is: torch compresses none, and a few bytes can be gigabytes.

    Args:
        file: a path, or a file that is open.

    Raises:
        UnsafeFile: they are, or there is no archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            bytes_in_all = sum(part.file_size for part in archive.infolist())
    except (ValueError, NotImplementedError, zipfile.BadZipFile) as error:  # zipfile's, the second for other versions
        raise UnsafeFile(f"{name} is damaged, or was not written by torch.save") from error
    if bytes_in_all > most_bytes:
        raise UnsafeFile(f"{name} claims {bytes_in_all} bytes, and has {most_bytes}")


def _check_sizes(found: Any, path: Path) -> None:
    """Check that no tensor claims more than the file has, as a view of one number can, and that nothing is nested deep.

    Raises:
        UnsafeFile: one does, or it is.
    """
    file_bytes = path.stat().st_size
    level = [found]
    for _ in range(_MOST_LEVELS):
        for value in level:
            if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > file_bytes:
                raise UnsafeFile(f"{path.name} claims a tensor of {tuple(value.shape)}, and has {file_bytes} bytes")
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise UnsafeFile(f"{path.name} is nested too deep")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def checked_state(state: Any, name: str) -> dict[str, Any]:
    """Return the state of a run, if it holds under each name what Lightning and the engine keep there.

    Raises:
        UnsafeFile: it is something else.
    """
    if not isinstance(state, dict):
        raise UnsafeFile(f"{name} holds no state of a run")
    for key, kind in _STATE.items():
        if key in state and type(state[key]) is not kind:
            raise UnsafeFile(f"{name} has a {type(state[key]).__name__} as {key}, expected a {kind.__name__}")
        if kind is int and key in state and not 0 <= state[key] < 1 << 62:
            raise UnsafeFile(f"{name} has {state[key]} as {key}")
    if not all(
        isinstance(part, dict) for part in (*state.get("optimizer_states", ()), *state.get("lr_schedulers", ()))
    ):
        raise UnsafeFile(f"{name} has no states of optimizers and schedulers")
    tied = state.get("names_of_tied", {})
    if not all(isinstance(one, str) for one in (*tied, *tied.values(), *state.get("left_out", ()))):
        raise UnsafeFile(f"{name} has a name of a tensor that is no text")
    if not re.match(r"\d+(\.\d+)*", state.get("pytorch-lightning_version", "0")):
        raise UnsafeFile(f"{name} names no version of Lightning")
    return state


def called(error: BaseException) -> str | None:
    """Return what a file names that `torch.load` would not call, in words; torch's own text advises to allow it."""
    found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return f"names {found[1]}, which would run code" if found else None


def _why(path: Path, error: Exception) -> str:
    if named := called(error):
        return f"{path.name} {named}"
    if "legacy .tar format" in str(error) or "TorchScript" in str(error):
        return f"{path.name} is in a format that can't be read without running code; save it with torch.save"
    return f"{path.name} is damaged, or was not written by torch.save"


def safe(value: Any) -> tuple[Any, dict[str, str]]:
    """Return ``value`` in plain types, and the type of each part that was left out for having none, by its place."""
    left_out: dict[str, str] = {}
    kept, plain = _plain(value, "", left_out)
    return plain if kept else None, left_out


def _plain(value: Any, path: str, left_out: dict[str, str]) -> tuple[bool, Any]:
    if isinstance(value, torch.Tensor):
        return True, value.detach().cpu().clone()  # it may change while it is being written
    if value is None or type(value) in _KEPT:
        return True, value
    if isinstance(value, Mapping):
        parts = {
            key: _plain(item, f"{path}.{key}", left_out)
            for key, item in value.items()
            if _plain(key, path, left_out)[0]
        }
        return True, {key: plain for key, (kept, plain) in parts.items() if kept}
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [_plain(item, f"{path}.{index}", left_out) for index, item in enumerate(value)]
        kind = type(value) if type(value) in (list, tuple, set) else list
        return True, kind(plain for kept, plain in items if kept)
    for known, converted in (
        (np.generic, lambda: value.item()),
        (np.ndarray, lambda: torch.from_numpy(value)),
        (Enum, lambda: value.value),
        (PurePath, lambda: str(value)),
        ((bool, int, float, str), lambda: next(kind(value) for kind in (int, float, str) if isinstance(value, kind))),
    ):
        if isinstance(value, known):
            return True, converted()
    public = (kind for kind in type(value).__mro__ if not kind.__name__.startswith("_"))  # Hydra's partials are not
    left_out[path.lstrip(".")] = next(public).__name__
    return False, None
