"""State in types that `torch.load(weights_only=True)` reads: a checkpoint from elsewhere runs no code.

Only this module of the engine reads files that `torch.save` has written.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# torch 2.15 warns that it checks the indices of each sparse tensor, as it should
warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)

_MOST_LEVELS = 64  # of nested mappings and lists
PLACES_OF_SHARDS = "places_of_shards"  # in a state: the keys and indices that lead to what was a DTensor
KINDS = "kinds_of_values"  # in a state: what was an array and the like, by the keys and indices that lead to it
_STATE: dict[str, type] = {  # types of the entries in a checkpoint's state, each of which is optional
    **dict.fromkeys(("epoch", "global_step"), int),
    **dict.fromkeys(("loops", "callbacks", "hyper_parameters", "extra_state", "names_of_tied"), dict),
    **dict.fromkeys(("frozen_since", "configured", KINDS), dict),
    **dict.fromkeys(
        ("optimizer_states", "lr_schedulers", "left_out", "streams", "of_ranks", "removed", "stopped_at"), list
    ),
    PLACES_OF_SHARDS: list,
    "pytorch-lightning_version": str,
}
_Place = tuple[Any, ...]
MOST_TENSORS = 1 << 17  # of one file; large mixtures of experts have 90,000, in dozens of files
_SHARD = ("shard",)  # the kind of a DTensor, which is sharded again once the parameters are known
_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device))
_CONTAINERS = frozenset((list, tuple, dict))


class UnsafeFile(ValueError):
    """Error of a file that `torch.load` can't read, or can't read without calling functions that the file names."""


def load(path: Path, mapped: bool = False) -> Any:
    """Return the content of a file of `torch.save`, in any of its formats, on the CPU.

    Args:
        mapped: memory-map tensors, so that they are read on use, if the format allows it.

    Raises:
        UnsafeFile: with the reason, for example a name that would run code.
    """
    if not path.is_file():  # a pipe would block
        raise UnsafeFile(f"{path.name} is not a regular file")
    try:
        if is_zip := _is_zip(path):
            check_zip(path, path.stat().st_size, path.name)
        found = torch.load(path, map_location="cpu", mmap=mapped and is_zip, weights_only=True)
        _check_sizes(found, path.name, path.stat().st_size)
        return found
    except UnsafeFile:
        raise
    except OSError as error:
        raise UnsafeFile(f"{path.name} can't be read: {error.strerror}") from error
    except Exception as error:  # torch raises many kinds of errors for a file that is not its own, or truncated
        raise UnsafeFile(_why(path, error)) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_zip(file: Any, most_bytes: int, name: str) -> None:
    """Check that an archive's files are not larger than the archive.

    torch does not compress, and a few compressed bytes can expand to gigabytes.

    Args:
        file: a path or an open file.

    Raises:
        UnsafeFile: they are larger, or the file is not a zip archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (ValueError, NotImplementedError, zipfile.BadZipFile) as error:  # the second: an unsupported version
        raise UnsafeFile(f"{name} is damaged, or was not written by torch.save") from error
    if len(parts) > MOST_TENSORS:
        raise UnsafeFile(f"{name} has {len(parts)} parts; a file of weights has at most {MOST_TENSORS}")
    if (bytes_in_all := sum(part.file_size for part in parts)) > most_bytes:
        raise UnsafeFile(f"{name} claims {bytes_in_all} bytes, but has {most_bytes}")


def _check_sizes(found: Any, name: str, file_bytes: int) -> None:
    """Check that no tensor has more bytes than the file, as an expanded view can, and that values are not nested deep.

    Raises:
        UnsafeFile: a tensor has more, or values are nested too deep.
    """
    level = [found]
    for _ in range(_MOST_LEVELS):
        for value in level:
            if isinstance(value, torch.Tensor) and _stored_numbers(value) * value.element_size() > file_bytes:
                raise UnsafeFile(f"{name} claims a tensor of {tuple(value.shape)}, but has {file_bytes} bytes")
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise UnsafeFile(f"{name} is nested too deep")


def _stored_numbers(tensor: torch.Tensor) -> int:
    is_dense = tensor.layout in (torch.strided, torch.jagged)
    return tensor.numel() if is_dense else tensor._nnz()  # all or, of a sparse one, those it has


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def checked_state(state: Any, name: str) -> dict[str, Any]:
    """Return the state of a run, after checking that its entries have the types that Lightning and the engine use.

    Values that `safe` has converted from one of a few types, such as an array, have that type again.

    Raises:
        UnsafeFile: an entry has another type, or a value out of range.
    """
    if not isinstance(state, dict):
        raise UnsafeFile(f"{name} does not contain the state of a run")
    if isinstance(kinds := state.get(KINDS), dict):
        around = {place[:depth] for place in kinds if isinstance(place, tuple) for depth in range(len(place))}
        state = _restored({key: value for key, value in state.items() if key != KINDS}, (), kinds, around)
        if shards := [place for place, kind in kinds.items() if kind == _SHARD]:
            state = {**state, PLACES_OF_SHARDS: shards} if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise UnsafeFile(f"{name} does not contain the state of a run")
    for key, kind in _STATE.items():
        if key in state and type(state[key]) is not kind:
            raise UnsafeFile(f"{name} has a {type(state[key]).__name__} as {key}, expected a {kind.__name__}")
        if kind is int and key in state and not 0 <= state[key] < 1 << 62:
            raise UnsafeFile(f"{name} has {state[key]} as {key}")
    if not all(
        isinstance(part, dict) for part in (*state.get("optimizer_states", ()), *state.get("lr_schedulers", ()))
    ):
        raise UnsafeFile(f"{name} has invalid states of optimizers or schedulers")
    tied = state.get("names_of_tied", {})
    if not all(
        isinstance(one, str) for one in (*tied, *tied.values(), *state.get("left_out", ()), *state.get("removed", ()))
    ):
        raise UnsafeFile(f"{name} has a tensor name that is not a string")
    if not re.match(r"\d+(\.\d+)*", state.get("pytorch-lightning_version", "0")):
        raise UnsafeFile(f"{name} has no valid Lightning version")
    return state


def _restored(value: Any, place: _Place, kinds: Mapping[Any, Any], around: Set[_Place]) -> Any:
    """Return a value with those in it that have a kind in their own types again.

    Args:
        around: places of the values that contain such values.
    """
    if place not in around:
        pass
    elif type(value) is dict:
        value = {key: _restored(item, (*place, key), kinds, around) for key, item in value.items()}
    elif type(value) in (list, tuple):
        value = type(value)(_restored(item, (*place, index), kinds, around) for index, item in enumerate(value))
    if place not in kinds:
        return value
    try:
        name, *argument = kinds[place]
        return _OF_KIND[name](value, *argument)
    except Exception:  # in a file from elsewhere, a kind may be anything
        return value


def _text_array(value: Any) -> np.ndarray:
    return np.array(value, dtype=str)


_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)}
_OF_KIND: dict[str, Callable[..., Any]] = {  # nothing else is called for a file
    "array": torch.Tensor.numpy,
    "text array": _text_array,
    "deque": deque,
    "defaultdict": lambda value, factory: defaultdict(_FACTORIES[factory], value),
    "Counter": Counter,
    "frozenset": frozenset,
    "shard": lambda value: value,
}


def called(error: BaseException) -> str | None:
    """Return a text with the name that `torch.load` refused to call; torch's own text advises to allow it."""
    found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return f"names {found[1]}, which would run code" if found else None


def _why(path: Path, error: Exception) -> str:
    if named := called(error):
        return f"{path.name} {named}"
    with path.open("rb") as file:
        if not any(file.read(512)):  # torch takes it for an empty archive
            return f"{path.name} begins with zeros: it is empty, or a crash of the machine has damaged it"
    if "legacy .tar format" in str(error) or "TorchScript" in str(error):
        return f"{path.name} is in a format that can't be read without running code; save it with torch.save"
    return f"{path.name} is damaged, or was not written by torch.save"


def safe(value: Any) -> tuple[Any, dict[str, str]]:
    """Return ``value`` in plain types, and the type names of the values that have no plain type, by their paths.

    Whatever is returned can be read by `load`: keys and converted values are made plain like all others. A dict gets
    the entry `KINDS`, by which `checked_state` converts arrays, deques and the like back. Collective: a DTensor, such
    as a parameter's copy in a callback under fsdp, becomes whole, as only rank 0's state is written.
    """
    left_out: dict[str, str] = {}
    kinds: dict[_Place, tuple[Any, ...]] = {}
    kept, marked = _plain(value, "", left_out)
    plain = _taken(marked, (), kinds) if kept else None
    return {**plain, KINDS: kinds} if kinds and isinstance(plain, dict) else plain, left_out


@dataclass(frozen=True)
class _Marked:
    """Value in plain types, and the kind that it was: a key of `_OF_KIND`, and its argument."""

    plain: Any
    kind: tuple[Any, ...]


def _taken(value: Any, place: _Place, kinds: dict[_Place, tuple[Any, ...]]) -> Any:
    """Return a value without marks, and put the kinds into a dict by place; keys and members of sets have no place."""
    if isinstance(value, _Marked):
        kinds[place] = value.kind
        return _taken(value.plain, place, kinds)
    if _is_plain(value):
        return value
    if type(value) is dict:
        items = [(_taken(key, (), {}), item) for key, item in value.items()]
        return {key: _taken(item, (*place, key), kinds) for key, item in items}
    if type(value) is set:
        return {_taken(item, (), {}) for item in value}
    if type(value) in (list, tuple):
        return type(value)(_taken(item, (*place, index), kinds) for index, item in enumerate(value))
    return value


def _plain(value: Any, path: str, left_out: dict[str, str], levels: int = _MOST_LEVELS - 1) -> tuple[bool, Any]:
    kept, plain = _unmarked(value, path, left_out, levels)
    kind = _kind(value, plain) if kept else None
    return kept, plain if kind is None else _Marked(plain, kind)


def _is_plain(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Return whether a value needs no conversion: lists of a million numbers are looked at by their types alone."""
    if type(value) in _SCALARS:
        return True
    if (
        levels == 0
        or type(value) not in _CONTAINERS
        or (type(value) is dict and not _SCALARS.issuperset(map(type, value)))
    ):
        return False
    parts = value.values() if type(value) is dict else value
    others = set(map(type, parts)) - _SCALARS
    return others <= _CONTAINERS and (not others or all(_is_plain(part, levels - 1) for part in parts))


def _kind(value: Any, plain: Any) -> tuple[Any, ...] | None:
    if isinstance(value, DTensor):
        return _SHARD
    if isinstance(value, np.ndarray):
        is_text = value.dtype.kind == "U"
        return ("array",) if isinstance(plain, torch.Tensor) else ("text array",) if is_text else None
    if isinstance(value, deque):
        return "deque", value.maxlen
    if isinstance(value, defaultdict):
        name = getattr(value.default_factory, "__name__", "")
        return ("defaultdict", name) if value.default_factory in _FACTORIES.values() else None
    return next(((kind.__name__,) for kind in (Counter, frozenset) if isinstance(value, kind)), None)


def _unmarked(value: Any, path: str, left_out: dict[str, str], levels: int) -> tuple[bool, Any]:
    if type(value) in _SCALARS:
        return True, value
    inner = partial(_plain, left_out=left_out, levels=levels - 1)
    if levels > 0:
        if _is_plain(value, levels):
            return True, pickle.loads(pickle.dumps(value, 5))  # training may change it during the write
        if isinstance(value, torch.Tensor) and (tensor := _plain_tensor(value)) is not None:
            return True, tensor
        for known, converted in _CONVERTED:
            if isinstance(value, known):
                return inner(converted(value), path)
        if isinstance(value, Mapping):
            items = [(inner(key, path), inner(item, f"{path}.{key}")) for key, item in value.items()]
            kept = {key: item for (has_key, key), (has_item, item) in items if has_key and has_item and _is_key(key)}
            return True, kept
        if isinstance(value, Sequence | Set | deque):
            found = [inner(item, f"{path}.{index}") for index, item in enumerate(value)]
            return True, _collection(value, [plain for kept, plain in found if kept])
    public = (kind for kind in type(value).__mro__ if not kind.__name__.startswith("_"))  # not Hydra's private partials
    left_out[path.lstrip(".")] = next(public).__name__
    return False, None


def _plain_tensor(value: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor; None for one of a kind that torch can't copy, write and read."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    is_special = whole.is_meta or whole.is_quantized or whole.layout != torch.strided
    is_usual = type(whole) in (torch.Tensor, torch.nn.Parameter) and not is_special
    try:
        copy: torch.Tensor = whole.detach().cpu().clone()  # training may change it during the write
        is_kept = type(copy) is torch.Tensor or is_traceable_wrapper_subclass(copy)
        plain = copy if is_kept else copy.as_subclass(torch.Tensor)
        return plain if is_usual or _is_readable(plain) else None
    except Exception:  # torch raises many kinds of errors: of a meta tensor, a mask, a lazy parameter
        if is_usual:
            raise
        return None


def _is_readable(value: Any) -> bool:
    """Return whether `load` can read a value that `torch.save` writes."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        _check_sizes(torch.load(file, weights_only=True), "it", len(file.getvalue()))
    except Exception:  # torch raises many kinds of errors for what it can't write or read
        return False
    return True


def first_unreadable(value: Any) -> str:
    """Return the path of the first value in a state that `load` can't read; empty if there is none."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in parts:
        if not _is_readable(item):
            return f"{key}.{first_unreadable(item)}".rstrip(".")
    return ""


def _plain_array(value: np.ndarray) -> Any:
    """Return an array as a tensor, or as lists if torch has no such dtype, for example of strings."""
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError):
        return value.tolist()


def _collection(value: Any, items: list[Any]) -> Any:
    if isinstance(value, set) and all(map(_is_key, items)):
        return set(items)
    return tuple(items) if isinstance(value, tuple | frozenset) else items


def _is_key(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


_CONVERTED: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (np.generic, lambda value: value.item()),
    (np.ndarray, _plain_array),
    (Enum, lambda value: value.value),
    (PurePath, str),
    ((int, float, str), lambda value: next(kind(value) for kind in (int, float, str) if isinstance(value, kind))),
)
