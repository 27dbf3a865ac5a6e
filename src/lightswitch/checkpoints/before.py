"""Checkpoints from before the JSON index: torch.distributed.checkpoint's `.metadata` and `__<rank>_0.distcp`.

They are read for one release: the next one deletes this file, its use in directory.py and its tests. torch's reader
unpickles the index, and so calls whatever the file names. Here every name in it must be in a list, and becomes a record
without behaviour.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightswitch.checkpoints.format import Damaged, Index, Shard, named_code

INDEX = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_BYTES = f"{_METADATA}.BytesStorageMetadata"
_RECORDS = {
    *(_BYTES, f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.Metadata", f"{_METADATA}.MetadataIndex"),
    *(f"{_METADATA}.ChunkStorageMetadata", f"{_METADATA}.TensorProperties", f"{_METADATA}._MEM_FORMAT_ENCODING"),
    *(f"{_METADATA}.StorageMeta", "torch.distributed.checkpoint.filesystem._StorageInfo"),
    *("torch.serialization._get_layout", "builtins.getattr"),  # the second in pickled enums of Python 3.11.0 to 3.11.3
    *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}
_BUILTINS: dict[str, Any] = {"torch.Size": tuple, "collections.OrderedDict": dict}


class PickledIndex(Index):
    """Index of a checkpoint whose shards are files of `torch.save`, one after the other."""

    def read(self, shard: Shard, box: tuple[slice, ...]) -> Tensor:
        with (self.path / shard.file).open("rb") as file:
            file.seek(shard.begin)
            part = io.BytesIO(file.read(shard.end - shard.begin))
        try:
            values = torch.load(part, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise Damaged(f"{shard.file} {named_code(error) or 'is damaged'}") from error
        if not isinstance(values, Tensor) or (values.shape, values.dtype) != (shard.sizes, self.like[shard.name].dtype):
            raise Damaged(f"{shard.file} does not contain {shard.name} as {INDEX} describes it")
        return values[box]


def read_index(path: Path) -> Index:
    """Return the index in a checkpoint's directory, restricted to tensors.

    Raises:
        Damaged: with the reason.
    """
    try:
        with (path / INDEX).open("rb") as file:
            return _parsed(path, _Unpickler(file).load()).check(INDEX)
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"{INDEX} can't be read: {error.strerror}") from error
    except Exception as error:  # pickle raises many kinds of errors for a file that is not a pickle, or truncated
        raise Damaged(f"{INDEX} is not an index of tensors") from error


def _parsed(path: Path, top: Any) -> Index:
    places = {(key.state["fqn"], key.state["offset"]): info.state for key, info in top.state["storage_data"].items()}
    like: dict[str, Tensor] = {}
    shards: dict[str, list[Shard]] = {}
    for name, record in top.state["state_dict_metadata"].items():
        if type(record).__name__ == _BYTES:  # which the engine has never written
            continue
        like[name] = torch.empty(record.state["size"], dtype=record.state["properties"].state[0], device="meta")
        boxes = [(tuple(one.state["offsets"]), tuple(one.state["sizes"])) for one in record.state["chunks"]]
        shards[name] = []
        for offsets, sizes in boxes if like[name].numel() else ():
            place = places[name, offsets]
            end = place["offset"] + place["length"]
            shards[name].append(Shard(name, offsets, sizes, place["relative_path"], place["offset"], end))
    return PickledIndex(path, like, shards)


class _Record:
    """Record of an object in the index: its state."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that calls only record classes, made for each unpickler so that no file can change those of another."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        found = self._classes.get(f"{module}.{name}") or _BUILTINS.get(f"{module}.{name}")
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise Damaged(f"{INDEX} names {module}.{name}, which would run code")
        return found
