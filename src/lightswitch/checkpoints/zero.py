"""Weights out of the directories that DeepSpeed writes, read as data.

DeepSpeed's own converter unpickles them with all that they name. Each rank's `*_optim_states.pt` holds its partition of
the flat groups of parameters in 32 bits; `*_model_states.pt` has the names and shapes, the buffers and what is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightswitch.checkpoints import safe

_FOLDER = "checkpoint"  # Lightning's tag
_OF_STAGE_1_2, _OF_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"

Shapes = Mapping[str, Sequence[int]]


def is_zero(path: Path) -> bool:
    """Return whether a directory is a checkpoint of DeepSpeed's."""
    return any(path.glob(f"{_FOLDER}/*_model_states.pt"))


def weights(path: Path) -> dict[str, Tensor]:
    """Return the weights by name, whole, in 32 bits; a tensor that has several names is the same one under each.

    Raises:
        ValueError: a file is missing, would run code, or does not fit the others.
    """
    models = [safe.load(file, mapped=True, inert="deepspeed") for file in _files(path, "model_states")]
    ranks = [
        safe.load(file, mapped=True, inert="deepspeed")["optimizer_state_dict"] for file in _files(path, "optim_states")
    ]
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


def _files(path: Path, kind: str) -> list[Path]:
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
        if sum(partition.numel() for partition in partitions) - start >= 2 * len(
            ranks
        ):  # a group is padded to a multiple of 2 × ranks
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
