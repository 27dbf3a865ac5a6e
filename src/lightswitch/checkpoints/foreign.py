"""Weights out of files that this engine has not written: safetensors, Lightning's own strategies', DeepSpeed's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from lightswitch import regular_files
from lightswitch.checkpoints import index, safe
from lightswitch.checkpoints.manifest import is_plain_name
from lightswitch.checkpoints.names import own_name

_VERSION, _OF_ANY = "pytorch-lightning_version", "2.0.0"  # a Trainer migrates older ones
_BEFORE_NAMES = ("_forward_module.", "module.")  # DeepSpeed's and DDP's wrappers
_FOLDER = "checkpoint"  # Lightning's tag
_OF_STAGE_1_2, _OF_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = Mapping[str, Sequence[int]]


def is_foreign(path: Path) -> bool:
    """Return whether a path is a checkpoint of one of Lightning's own strategies, or weights alone, and not of this
    engine."""
    return is_hub(path) or path.is_file() or _is_sharded(path) or is_zero(path)


def weights_and_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a checkpoint of Lightning's by name, whole and on the CPU, and the rest of its state.

    It may be a `.ckpt` file (one device, DDP, FSDP full), a sharded directory (FSDP), DeepSpeed's, or safetensors. What
    modules keep that is not a tensor is in the state under "extra_state", as in a checkpoint of the engine.

    Raises:
        ValueError: it is something else, is damaged, or can't be read without running code.
    """
    state: dict[str, Any] = {_VERSION: _OF_ANY}
    if is_hub(path):
        return hub_weights(path), state
    if path.is_file():
        state = read(path)
        named = _own_names(state.pop("state_dict"))
    else:
        named = _own_names(zero_weights(path) if is_zero(path) else _of_shards(path))
    tensors = {name: value.detach() for name, value in named.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in named.items() if name not in tensors}
    first = _first_names(tensors)
    tied = {name: first[name] for name in tensors if first[name] != name}
    weights = {name: value for name, value in tensors.items() if name not in tied}
    return weights, {**state, "extra_state": extra, "names_of_tied": tied}


def read(path: Path) -> dict[str, Any]:
    """Return what a `.ckpt` file of Lightning's holds, with its tensors mapped from the file.

    Raises:
        ValueError: the file is something else, or can't be read without running code.
    """
    state = safe.load(path, mapped=True)
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise ValueError("it has no state_dict; give one of those that a run keeps in its checkpoints/")
    return safe.checked_state({_VERSION: _OF_ANY, **state}, path.name)


def _is_sharded(path: Path) -> bool:
    return (path / "meta.pt").exists() and (path / index.INDEX).exists()


def _of_shards(path: Path) -> dict[str, Tensor]:
    found = index.read(path)
    whole = {
        key: torch.empty_like(tensor, device="cpu")
        for key, tensor in found.tensors().items()
        if key.startswith(("state_dict.", "model."))
    }
    load(whole, storage_reader=found.reader(), no_dist=True)
    return {key.partition(".")[2]: tensor for key, tensor in whole.items()}


def _own_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    named = {own_name(name): value for name, value in state_dict.items()}
    for wrapper in _BEFORE_NAMES:
        if all(name.startswith(wrapper) for name in named):
            named = {name.removeprefix(wrapper): value for name, value in named.items()}
    return named


def _first_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of the same tensor: a tied weight has several."""
    first: dict[tuple[Any, ...], str] = {}
    names = {}
    for name, value in tensors.items():
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        names[name] = first.setdefault(memory, name)
    return names


def is_zero(path: Path) -> bool:
    """Return whether a directory is a checkpoint of DeepSpeed's."""
    return any(path.glob(f"{_FOLDER}/*_model_states.pt"))


def zero_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of DeepSpeed's by name, whole, in 32 bits; tied names share one tensor.

    DeepSpeed's own converter unpickles the files with all that they name. Each rank's `*_optim_states.pt` holds its
    partition of the flat groups of parameters in 32 bits; `*_model_states.pt` has the names and shapes, the buffers and
    what is frozen.

    Raises:
        ValueError: a file is missing, would run code, or does not fit the others.
    """
    load_data = partial(safe.load, mapped=True, inert="deepspeed")
    models = [load_data(file) for file in _zero_files(path, "model_states")]
    ranks = [load_data(file)["optimizer_state_dict"] for file in _zero_files(path, "optim_states")]
    model = models[0]
    expected = ranks[0]["partition_count"]
    expected = max(expected) if isinstance(expected, list) else expected
    if len(ranks) != expected or model.get("mp_world_size", 1) != 1:
        raise ValueError(
            f"{_FOLDER} has the states of {len(ranks)} ranks, expected {expected} without tensor parallelism"
        )
    found = {name: _in_32_bits(model["module"][name]) for name in model["buffer_names"]}
    if _OF_STAGE_3 in ranks[0]:
        found |= dict(_of_stage_3(models, [rank[_OF_STAGE_3] for rank in ranks]))
    else:
        found |= dict(_of_stage_1_2(model, ranks))
    return found | {name: found[first] for name, first in model["shared_params"].items() if first in found}


def _zero_files(path: Path, kind: str) -> list[Path]:
    """Return the files of a kind in the order of ranks: 10 comes after 9."""
    found = sorted((path / _FOLDER).glob(f"*_{kind}.pt"), key=lambda file: (len(file.name), file.name))
    if not found:
        raise ValueError(f"{_FOLDER}/*_{kind}.pt are missing")
    return found


def _in_32_bits(buffer: Tensor) -> Tensor:
    return buffer.float() if buffer.is_floating_point() else buffer


def _of_stage_1_2(model: Mapping[str, Any], ranks: list[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of stages 1 and 2, where the ranks' partitions of a group follow one another."""
    yield from (model["frozen_param_fragments"] or {}).items()
    shapes: list[Shapes] = model["param_shapes"]
    paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for number, (group, padding) in enumerate(zip(shapes, paddings, strict=True)):
        partitions, start = [rank[_OF_STAGE_1_2][number] for rank in ranks], 0
        for (name, shape), gap in zip(group.items(), padding, strict=True):
            yield name, _slice(partitions, start, math.prod(shape)).view(tuple(shape))
            start += math.prod(shape) + gap
        unused = sum(partition.numel() for partition in partitions) - start
        if unused >= 2 * len(ranks):  # a group is padded to a multiple of 2 × ranks
            raise ValueError(f"{_FOLDER} has more numbers than parameters")


def _of_stage_3(models: list[Mapping[str, Any]], ranks: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of stage 3, of which each rank holds an equal part; the last one's is padded."""
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        yield name, _slice(parts, 0, math.prod(shape)).view(tuple(shape))
    start = 0
    for name, shape in ((name, shape) for group in models[0]["param_shapes"] for name, shape in group.items()):
        count = math.ceil(math.prod(shape) / len(ranks))
        whole = torch.cat([_slice(groups, start, count) for groups in ranks])
        yield name, whole[: math.prod(shape)].view(tuple(shape))
        start += count
    if start != sum(group.numel() for group in ranks[0]):
        raise ValueError(f"{_FOLDER} has {sum(group.numel() for group in ranks[0])} numbers a rank, and names {start}")


def _slice(partitions: list[Tensor], start: int, count: int) -> Tensor:
    """Return ``count`` numbers from ``start`` on, of flat partitions that follow one another: (count,)."""
    parts = []
    end = start + count
    for partition in partitions:
        if start < partition.numel() and end > 0:
            parts.append(partition[max(start, 0) : end])
        start, end = start - partition.numel(), end - partition.numel()
    found = torch.cat(parts) if parts else torch.empty(0)
    if found.numel() != count:
        raise ValueError(f"{_FOLDER} has too few numbers for its parameters")
    return found


def is_hub(path: Path) -> bool:
    """Return whether a path is a file of safetensors, the index of several, or a folder with either."""
    return (path.is_dir() and _in(path) is not None) or path.name.endswith((".safetensors", ".safetensors.index.json"))


def hub_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors by the names in the files, on the CPU, each mapped from its file.

    Raises:
        ValueError: the index names a file elsewhere, or is none.
        OSError, SafetensorError: a file can't be read, or is a pipe or a device.
    """
    file = _in(path) or path
    if file.suffix != ".json":
        return load_file(regular_files.check(file))
    index: Any = regular_files.read_json(file)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{file.name} is not an index of safetensors")
    if outside := next((name for name in shards.values() if not is_plain_name(name)), None):
        raise ValueError(f"{file.name} names a file outside of its folder: {outside}")
    files = [regular_files.check(file.parent / shard) for shard in sorted(set(shards.values()))]
    found = {name: value for shard in files for name, value in load_file(shard).items()}
    if missing := sorted(shards.keys() - found.keys()):
        raise ValueError(f"{file.name} names {missing[0]}, which its files lack")
    return found


def _in(folder: Path) -> Path | None:
    return next((folder / name for name in (_FILE, _INDEX) if (folder / name).is_file()), None)
