"""Strategies that a plan compares, and advice if none of them fits or a run is out of memory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from hydra.conf import HydraConf
from hydra.utils import get_class, get_object
from omegaconf import OmegaConf

from lightswitch.config.overrides import files_of_group
from lightswitch.planning import report
from lightswitch.planning.device import GIB, Device
from lightswitch.planning.estimate import STATES, Estimate

_TRIED = ("single", "ddp", "fsdp_grad_op", "fsdp_hybrid", "fsdp", "fsdp_offload")  # by auto, the simplest first
_TRIED_ALONE = ("single", "fsdp", "fsdp_offload")  # with strategy=auto on one device
_RECOMPUTES = "activation_checkpointing"
_OFFLOADS = "cpu_offload"
_REPLICATED = ("Single", "DDP")
_ZERO = "DeepSpeed"


@dataclass(frozen=True)
class Candidate:
    """A strategy, and the overrides that select it.

    Attributes:
        words: command-line overrides that select it.
        node: its config node: the class and its arguments.
    """

    words: tuple[str, ...]
    node: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the strategy on the command line."""
        return self.words[0].partition("=")[2]

    @property
    def offloads(self) -> bool:
        """Return whether any state is offloaded to the host's memory."""
        return any(self.node.get(key) for key in (_OFFLOADS, "offload_parameters", "offload_optimizer"))

    @property
    def ranks_of_a_sample(self) -> int:
        """Number of consecutive ranks that read the same samples: those that share layers."""
        return int(self.node.get("tensor_parallel_size", 1))

    @property
    def is_replicated(self) -> bool:
        """Whether each device holds all states unsharded."""
        return str(self.node.get("_target_")).rpartition(".")[2] in _REPLICATED

    @property
    def shards_all(self) -> bool:
        """Return whether parameters, gradients and optimizer state are all sharded over all devices."""
        is_full = self.node.get("sharding_strategy", "FULL_SHARD") == "FULL_SHARD"
        is_full = is_full and (not self.is_zero or self.node.get("stage") == 3)
        return is_full and not self.is_replicated and not self.offloads

    @property
    def is_zero(self) -> bool:
        """Whether it is a DeepSpeed strategy."""
        return str(self.node.get("_target_")).rpartition(".")[2] == _ZERO

    def recomputing(self) -> Candidate | None:
        """Return the candidate with activation checkpointing; None if it has that already or does not support it."""
        if self.node.get(_RECOMPUTES) or _RECOMPUTES not in _arguments(self.node):
            return None
        words = (*self.words, f"trainer.strategy.{_RECOMPUTES}=true")
        return replace(self, words=words, node={**self.node, _RECOMPUTES: True})


def chosen(choice: object, node: Mapping[str, Any]) -> Candidate:
    """Return the configured strategy with its arguments."""
    return Candidate((f"strategy={choice}",), node)


def every(hydra: HydraConf, nodes: int, with_zero: bool = False) -> list[Candidate]:
    """Return all strategies of the config folders that are separate classes, the simplest first.

    Strategies are left out if they lack a value (???), or use HYBRID_SHARD on a single node.

    Args:
        with_zero: whether to include DeepSpeed's stages if DeepSpeed is installed.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, path in files_of_group(hydra, "strategy").items():
        loaded: Any = OmegaConf.load(path)
        node: Any = OmegaConf.to_container(loaded.get("strategy"), resolve=False)
        if isinstance(node, dict) and "???" not in node.values() and "start_method" not in node:  # as another
            found[name] = node
    named = sorted(found, key=lambda name: (_TRIED.index(name) if name in _TRIED else len(_TRIED), name))
    those = [Candidate((f"strategy={name}",), found[name]) for name in named if _is_compared(found[name], nodes)]
    return [one for one in those if with_zero or not one.is_zero]


def simplest(hydra: HydraConf, nodes: int, devices_per_node: int, device: Device) -> list[Candidate]:
    """Return the strategies that strategy=auto tries, in order.

    Strategies that keep everything on the devices come before those that offload to the host, and each of the two
    groups is repeated with activation checkpointing. None offloads if the device's memory is the host's.
    """
    found = [one for one in every(hydra, nodes) if one.name in _TRIED]
    if nodes * devices_per_node == 1:
        found = [one for one in found if one.name in _TRIED_ALONE]
    on_device = [one for one in found if not one.offloads]
    offloading = [one for one in found if one.offloads and not device.is_host]
    return [*on_device, *_recomputing(on_device), *offloading, *_recomputing(offloading)]


def _recomputing(those: Iterable[Candidate]) -> Iterator[Candidate]:
    return (other for one in those if (other := one.recomputing()) is not None)


def _is_compared(node: Mapping[str, Any], nodes: int) -> bool:
    """Return whether a config node is a strategy to compare.

    A node that names a function, such as that of strategy=auto, stands for one of the others.
    """
    module, _, name = str(node.get("_target_")).rpartition(".")
    if find_spec(module) is None:
        return False
    if name == _ZERO:
        return find_spec("deepspeed") is not None
    if "HYBRID" in str(node.get("sharding_strategy")) and nodes == 1:
        return False
    return isinstance(get_object(f"{module}.{name}"), type)


def _arguments(node: Mapping[str, Any]) -> set[str]:
    """Return the names of a strategy's arguments, including those of base classes, such as FSDP."""
    classes = get_class(str(node["_target_"])).__mro__
    return {name for cls in classes if "__init__" in vars(cls) for name in inspect.signature(cls).parameters}


def what_would_fit(tried: Sequence[Estimate], sharding: Sequence[Estimate], device: Device) -> str:
    """Return advice on the smallest change that makes the run fit: a smaller micro-batch, or more or larger devices.

    If every strategy offloads more than the host's memory holds, the advice is on the host instead of the devices.

    Args:
        tried: the estimates, none of which fits.
        sharding: those of ``tried`` that shard all states over all devices.
    """
    samples = max(found.largest_micro_batch or 0 for found in tried)
    if samples:
        return f"use micro_batch_size={samples} or less"
    enough = [one.memory.bytes for one in tried if one.memory.fits_host]
    if not enough:
        needed = min(one.memory.host_bytes * one.run.world.devices_per_node for one in tried)
        return f"use more nodes, or nodes with {report.amount(needed)} of free memory"
    found = [count for one in sharding if (count := devices_needed(one)) is not None]
    larger = f"devices of {report.amount(bytes_needed(min(enough), device))}"
    return f"use at least {min(found)} devices, or {larger}" if found else f"use {larger}, or shorter samples"


def devices_needed(found: Estimate) -> int | None:
    """Return the smallest number of devices on which a sharded run fits; None if no number is enough.

    States are divided by the number of devices; all other memory per device stays the same.
    """
    memory = found.memory
    states = sum(memory.peak.by_kind.get(kind, 0) for kind in STATES)
    room = memory.usable_bytes - (memory.bytes - states)
    return math.ceil(states * found.run.world.size / room) if room > 0 else None


def bytes_needed(bytes: float, device: Device) -> float:
    """Return the memory that a device of this kind needs so that ``bytes`` of it are usable."""
    return GIB * bytes / device.with_memory(1).usable_bytes(1)
