"""Collectives of a step, and the bytes that they send within a node and between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

_NAMES = {  # by operator name in torch.ops.c10d and torch.ops._c10d_functional
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        bytes: size of the full tensor, which each rank holds after an all-gather or before a reduce-scatter.
        ranks: ranks of its process group.
    """

    name: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives from others in its node, and that one node receives from other nodes."""

    within: float
    between: float

    def of_a_device(self, devices_per_node: int) -> float:
        """Return the bytes that one device receives in all; the devices of a node share what the node receives."""
        return self.within + self.between / devices_per_node


def collective(func: Any, args: Any, made: list[Tensor]) -> Collective | None:
    """Return the collective that an operator runs; None if the operator is not a collective."""
    if func.namespace not in ("c10d", "_c10d_functional") or (name := _NAMES.get(func._opname)) is None:
        return None
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    sizes = {tensor.untyped_storage()._cdata: tensor.nbytes for tensor in (*given, *made)}
    largest = sum(sizes.values()) if func._opname == "allreduce_" else max(sizes.values(), default=0)
    return Collective(name, largest, _ranks(func.namespace, args))


def _ranks(namespace: str, args: Any) -> tuple[int, ...]:
    if namespace == "c10d":
        group = next(dist.ProcessGroup.unbox(leaf) for leaf in args if isinstance(leaf, ScriptObject))
    else:
        name: Any = next(leaf for leaf in reversed(args) if isinstance(leaf, str))
        group = _resolve_process_group(name)
    return tuple(dist.get_process_group_ranks(group))


def traffic(collectives: Iterable[Collective], devices_per_node: int) -> Traffic:
    """Return the minimum traffic that links must carry, independent of the algorithm.

    In an all-gather, each device and each node must receive the bytes that it lacks. A reduce-scatter is the reverse,
    and an all-reduce is both (Thakur et al. 2005, doi:10.1177/1094342005051521).
    """
    within = between = 0.0
    for one in collectives:
        nodes = len({rank // devices_per_node for rank in one.ranks})
        local = len(one.ranks) / max(1, nodes)  # devices of the group per node
        times = 2 if one.name == "all_reduce" else 1
        groups = devices_per_node / local if nodes > 1 else 0  # parallel groups that share the node's network
        between += times * groups * one.bytes * (nodes - 1) / max(1, nodes)
        within += times * one.bytes * (local - 1) / local if local > 1 else 0
    return Traffic(within, between)


@dataclass(frozen=True)
class Exchange:
    """Traffic of a rank in one step, for one kind of collective in one process group.

    Attributes:
        count: number of collectives per step.
        bytes: total size of their full tensors; see `Collective`.
    """

    name: str
    ranks: tuple[int, ...]
    count: int
    bytes: int


def exchanges(step: Iterable[tuple[Collective, int]]) -> tuple[Exchange, ...]:
    """Return a step's collectives, summed by name and process group, the largest first.

    Groups of one rank send nothing and are left out.

    Args:
        step: each collective and its number of occurrences in the step.
    """
    count: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for one, times in step:
        if len(one.ranks) > 1:
            count[one.name, one.ranks] += times
            sent[one.name, one.ranks] += times * one.bytes
    found = [Exchange(*key, count[key], sent[key]) for key in count if count[key]]
    return tuple(sorted(found, key=lambda one: -one.bytes))
