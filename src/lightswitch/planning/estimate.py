"""What a run takes on a device, from one simulated step: memory over time, traffic, a checkpoint. Arithmetic alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from lightswitch.planning.device import Device

Kind = Literal[
    "parameters", "gradients", "optimizer", "buffers", "gathered", "communication", "activations", "temporary"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Change:
    """A change of the memory in use: bytes that are taken or, if negative, given back.

    Attributes:
        phase: of the step: forward, backward or optimizer.
        where: path of the module at work.
    """

    kind: Kind
    bytes: float
    phase: str
    where: str


@dataclass(frozen=True)
class Peak:
    """The most that a device holds at once, and when that is.

    Attributes:
        by_kind: bytes, which add up to ``bytes``.
        phase, where: see `Change`.
    """

    bytes: float
    by_kind: Mapping[Kind, float]
    phase: str
    where: str

    def extrapolated(self, other: Peak, weight: float) -> Timeline:
        """Return a step that has this peak at a weight of 0 and the other at 1, kind by kind, and nothing else."""
        held = {
            kind: max(0.0, self.by_kind.get(kind, 0.0) * (1 - weight) + other.by_kind.get(kind, 0.0) * weight)
            for kind in KINDS
        }
        largest = max(KINDS, key=held.__getitem__)
        last = Change(largest, held.pop(largest), self.phase, self.where)
        return Timeline(held, (last,))


@dataclass(frozen=True)
class Timeline:
    """Bytes that are held when a step starts, and how they change until it ends."""

    before: Mapping[Kind, float]  # bytes
    changes: tuple[Change, ...]

    def held(self) -> list[float]:
        """Return the bytes that are held at the start and after each change."""
        return list(accumulate((change.bytes for change in self.changes), initial=sum(self.before.values())))

    def peak(self) -> Peak:
        """Return the first of the moments at which most is held."""
        held = self.held()
        at = max(range(len(held)), key=held.__getitem__)
        by_kind: dict[Kind, float] = defaultdict(float, self.before)
        for change in self.changes[:at]:
            by_kind[change.kind] += change.bytes
        last = self.changes[at - 1] if at else None
        shown = {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}
        return Peak(held[at], shown, last.phase if last else "", last.where if last else "")

    def accumulating(self) -> Timeline:
        """Return the step as if another micro batch had come before it, to whose gradients it adds its own.

        A gradient is freed once it is added, which is when the next one is made.
        """
        changes, pending = [], 0.0
        for change in self.changes:
            if change.kind != "gradients":
                changes.append(change)
                continue
            made = max(0.0, change.bytes)
            changes.append(replace(change, bytes=made - pending if made else 0.0))
            pending = made or pending
        return Timeline(self.before, tuple(changes))


@dataclass(frozen=True)
class Growth:
    """A step at two sizes of its micro batch, from which it is extrapolated to any other.

    The bytes of each storage are affine in the samples. Those of the peak are not, as it may move to another moment; so
    storages are extrapolated, and the peak is found anew. A step that takes another path at another size, as one whose
    loss is computed in chunks, has no storages that correspond: there the two peaks are extrapolated, kind by kind.

    Attributes:
        samples: the two sizes.
        steps: the step at each.
    """

    samples: tuple[int, int]
    steps: tuple[Timeline, Timeline]

    @property
    def is_known(self) -> bool:
        """Whether the two sizes differ."""
        return self.samples[0] != self.samples[1]

    def at(self, samples: int) -> Timeline:
        """Return the step at a micro batch of so many samples; the first of the two, where growth is not known."""
        one, other = self.steps
        if samples == self.samples[0] or not self.is_known:
            return one
        weight = self._weight(samples)
        if not self._is_one_path:
            return self._peaks[0].extrapolated(self._peaks[1], weight)
        changes = tuple(
            replace(a, bytes=a.bytes + weight * (b.bytes - a.bytes))
            for a, b in zip(one.changes, other.changes, strict=True)
        )
        before = {kind: bytes + weight * (other.before.get(kind, 0) - bytes) for kind, bytes in one.before.items()}
        return Timeline(before, changes)

    def accumulating(self) -> Growth:
        """Return the growth of a step that accumulates several such micro batches; see `Timeline.accumulating`."""
        one, other = self.steps
        return Growth(self.samples, (one.accumulating(), other.accumulating()))

    def peak_bytes(self, samples: int) -> float:
        """Return the bytes of `at(samples).peak()`, in less time."""
        weight = self._weight(samples)
        return max(a + weight * (b - a) for a, b in self._held)

    def _weight(self, samples: int) -> float:
        return (samples - self.samples[0]) / (self.samples[1] - self.samples[0])

    @cached_property
    def _is_one_path(self) -> bool:
        one, other = self.steps
        return [change.kind for change in one.changes] == [change.kind for change in other.changes]

    @cached_property
    def _peaks(self) -> tuple[Peak, Peak]:
        return self.steps[0].peak(), self.steps[1].peak()

    @cached_property
    def _held(self) -> list[tuple[float, float]]:
        """Pairs of the bytes that both steps hold after each change, each pair once; of two paths, at their peaks."""
        if not self._is_one_path:
            return [(self._peaks[0].bytes, self._peaks[1].bytes)]
        return sorted(set(zip(*(step.held() for step in self.steps), strict=True)))


_NAMES = {  # by the operator's name, in torch.ops.c10d and torch.ops._c10d_functional
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
    """One collective.

    Attributes:
        bytes: of the whole tensor: what each rank has after an all-gather, or before a reduce-scatter.
        ranks: of the group.
    """

    name: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes that collectives bring to one device from others in its node, and to one node from other nodes."""

    within: float
    between: float


def collective(func: Any, args: Any, made: list[Tensor]) -> Collective | None:
    """Return the collective that an operator is; None for any other operator."""
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
    """Return the least that links must carry, whatever the algorithm.

    Of an all-gather, each device has to receive what it lacks, and so has each node; a reduce-scatter is the same
    backwards, an all-reduce both (Thakur et al. 2005, doi:10.1177/1094342005051521).
    """
    within = between = 0.0
    for one in collectives:
        nodes = len({rank // devices_per_node for rank in one.ranks})
        local = len(one.ranks) / max(1, nodes)  # devices of the group in a node
        times = 2 if one.name == "all_reduce" else 1
        groups = devices_per_node / local if nodes > 1 else 0  # of the same kind, which share the node's network
        between += times * groups * one.bytes * (nodes - 1) / max(1, nodes)
        within += times * one.bytes * (local - 1) / local if local > 1 else 0
    return Traffic(within, between)


@dataclass(frozen=True)
class Exchange:
    """Traffic of a rank in a step by one kind of collective, within one group.

    Attributes:
        count: of collectives in a step.
        bytes: of their whole tensors; see `Collective`.
    """

    name: str
    ranks: tuple[int, ...]
    count: int
    bytes: int


def exchanges(step: Iterable[tuple[Collective, int]]) -> tuple[Exchange, ...]:
    """Return a step's collectives, summed by name and group, the largest first.

    Groups of one rank send nothing, and are left out.

    Args:
        step: each collective, and how often it comes in the step.
    """
    count: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for one, times in step:
        if len(one.ranks) > 1:
            count[one.name, one.ranks] += times
            sent[one.name, one.ranks] += times * one.bytes
    found = [Exchange(*key, count[key], sent[key]) for key in count if count[key]]
    return tuple(sorted(found, key=lambda one: -one.bytes))


STATES: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")  # what one step leaves to the next
_MOST_SAMPLES = 2**20  # of a micro batch: beyond it, what is searched is not memory


@dataclass(frozen=True)
class Step:
    """Work of one rank in an optimizer step, counted once for a micro batch and once for the last one.

    Attributes:
        growth: of its memory with the samples of a micro batch.
        samples: size of the micro batch in which operations and collectives were counted.
        micro_flops: floating-point operations of a micro batch.
        micro_collectives: of a micro batch that is not a step's last.
        last_collectives: of a step's last micro batch, with clipping and the optimizer.
        parameters: number of the whole model's parameters.
        parameter_bytes, optimizer_bytes: of the whole model, as a checkpoint holds them.
        guessed: values that a micro batch has asked for, and that were guessed, by the place that asks.
    """

    growth: Growth
    samples: int
    micro_flops: float
    micro_collectives: tuple[Collective, ...]
    last_collectives: tuple[Collective, ...]
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    guessed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run's batch, world and precision: what is asked for, apart from the strategy.

    Attributes:
        micro_batch, accumulation: samples a device takes at once, and how often a step.
        replicas: devices that read different samples.
        nodes, devices_per_node: which the world is made of.
        precision, matmul_precision: as typed.
        param_dtype: torch's name of the dtype in which the strategy computes; None for the precision's.
        steps: of the whole run; None where it has no limit.
        tokens_per_sample: None for data that are not of tokens.
        disk_gb_per_second: of all that write a checkpoint.
        global_batch: samples of an optimizer step; some less than these make, where it does not divide.
    """

    micro_batch: int
    accumulation: int
    replicas: int
    nodes: int
    devices_per_node: int
    precision: str
    matmul_precision: str
    steps: int | None
    tokens_per_sample: int | None
    disk_gb_per_second: float
    global_batch: int
    param_dtype: str | None = None

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def rounds_weights(self) -> bool:
        """Return whether weights are kept in 16 bits, where small updates of them are lost."""
        return self.precision in ("16-true", "bf16-true")


@dataclass(frozen=True)
class Memory:
    """Memory of a device at the peak of a step.

    Attributes:
        runtime_bytes: beside tensors; see `Device.runtime_bytes`.
        usable_bytes: what it could hold.
        host_bytes: what the process keeps in the host's memory instead; of it, ``host_parameter_bytes``.
        usable_host_bytes: what it could have there.
    """

    peak: Peak
    runtime_bytes: float
    usable_bytes: float
    host_bytes: float
    host_parameter_bytes: float
    usable_host_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes in all."""
        return self.peak.bytes + self.runtime_bytes

    @property
    def fits(self) -> bool:
        """Return whether the device and the host can hold it."""
        return self.bytes <= self.usable_bytes and self.host_bytes <= self.usable_host_bytes


@dataclass(frozen=True)
class StepTime:
    """Lower bounds of a step's time, each as if the others took none.

    Attributes:
        seconds: by what bounds it: arithmetic, memory, links within a node, network between nodes.
    """

    seconds: Mapping[str, float]

    @property
    def bound(self) -> str | None:
        """Name of what takes longest; None where nothing is known."""
        return max(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def least_seconds(self) -> float | None:
        """Largest of the bounds: no step is shorter."""
        return max(self.seconds.values(), default=None)


@dataclass(frozen=True)
class Estimate:
    """Memory, time and traffic of a run under one strategy.

    Attributes:
        words: overrides that choose the strategy on the command line.
        largest_micro_batch: that the device can hold; None where it is not known, 0 where not even one sample fits.
        flops: of a step, of one device.
        checkpoint_bytes: of one checkpoint, over all ranks.
        guessed: see `Step`.
    """

    words: tuple[str, ...]
    run: Run
    memory: Memory
    largest_micro_batch: int | None
    flops: float
    traffic: Traffic
    time: StepTime
    parameters: int
    checkpoint_bytes: int
    guessed: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float | None:
        """Return the most samples a second, over all devices."""
        seconds = self.time.least_seconds
        return self.run.global_batch / seconds if seconds else None

    @property
    def hours(self) -> float | None:
        """Return the least hours of the whole run."""
        seconds, steps = self.time.least_seconds, self.run.steps
        return seconds * steps / 3600 if seconds and steps else None

    @property
    def save_seconds(self) -> float:
        """Return the seconds to write a checkpoint."""
        return self.checkpoint_bytes / (self.run.disk_gb_per_second * 1e9)


def estimate(words: tuple[str, ...], step: Step, run: Run, device: Device, on_host: Collection[Kind] = ()) -> Estimate:
    """Return what a run takes under a strategy whose step was simulated.

    Args:
        on_host: what is kept in the host's memory.
    """
    groups = len({one.ranks for one in (*step.micro_collectives, *step.last_collectives) if len(one.ranks) > 1})
    memory = memory_at(run.micro_batch, step.growth, device, run.devices_per_node, groups, on_host)
    sent = _step_traffic(step, run)
    flops = step.micro_flops * run.micro_batch / step.samples * run.accumulation
    return Estimate(
        words,
        run,
        memory,
        largest_micro_batch(step.growth, device, run.devices_per_node, groups, on_host),
        flops,
        sent,
        step_time(flops, _moved_bytes(memory, run), sent, _host_traffic(memory, run), run, device),
        step.parameters,
        step.parameter_bytes + step.optimizer_bytes,
        step.guessed,
    )


def memory_at(
    samples: int, growth: Growth, device: Device, devices_per_node: int, groups: int, on_host: Collection[Kind] = ()
) -> Memory:
    """Return what a device holds at its peak, at a micro batch of so many samples."""
    peak = growth.at(samples).peak()
    host = parameters = 0.0
    if on_host:
        parameters = peak.by_kind.get("parameters", 0) if "parameters" in on_host else 0.0
        host = sum(peak.by_kind.get(kind, 0) for kind in on_host)
        kept = {kind: bytes for kind, bytes in peak.by_kind.items() if kind not in on_host}
        peak = Peak(peak.bytes - host, kept, peak.phase, peak.where)
    return Memory(
        peak,
        device.runtime_bytes(peak.bytes, groups),
        device.usable_bytes(devices_per_node),
        host,
        parameters,
        device.host_bytes(devices_per_node),
    )


def largest_micro_batch(
    growth: Growth, device: Device, devices_per_node: int, groups: int, on_host: Collection[Kind] = ()
) -> int | None:
    """Return the most samples of a micro batch that a device can hold; None where growth is not known.

    Found by bisection: what a step holds grows with its samples.
    """
    if not growth.is_known:
        return None

    elsewhere = memory_at(growth.samples[0], growth, device, devices_per_node, groups, on_host).host_bytes

    def fits(samples: int) -> bool:
        bytes = growth.peak_bytes(samples) - elsewhere
        return bytes + device.runtime_bytes(bytes, groups) <= device.usable_bytes(devices_per_node)

    low, high = 0, 1
    while high < _MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def step_time(flops: float, moved_bytes: float, sent: Traffic, host_bytes: float, run: Run, device: Device) -> StepTime:
    """Return the lower bounds of a step's time.

    Args:
        moved_bytes: that the device's memory has to read and write at least.
        host_bytes: that come from the host's memory.
    """
    peak = device.peak_flops(run.param_dtype or run.precision, run.matmul_precision)
    rates = {
        "arithmetic": (flops, peak),
        "memory": (moved_bytes, _per_second(device.memory_gb_per_second)),
        "links in a node": (sent.within, _per_second(device.link_gb_per_second)),
        "network": (sent.between, _per_second(device.network_gb_per_second)),
    }
    if host_bytes and device.kind != "cpu":
        rates["host's memory"] = (host_bytes, device.host_gb_per_second * 1e9)
    return StepTime({name: amount / rate for name, (amount, rate) in rates.items() if rate})


def _per_second(gb: float | None) -> float | None:
    return None if gb is None else gb * 1e9


def _step_traffic(step: Step, run: Run) -> Traffic:
    """Return the traffic of a step: that of its last micro batch, and that of the others as often as they come."""
    micro = traffic(step.micro_collectives, run.devices_per_node)
    last = traffic(step.last_collectives, run.devices_per_node)
    times = run.accumulation - 1
    return Traffic(times * micro.within + last.within, times * micro.between + last.between)


def _host_traffic(memory: Memory, run: Run) -> float:
    """Return the bytes that a device gets from the host: its shards, for the forward and the backward pass."""
    return 2 * run.accumulation * memory.host_parameter_bytes


def _moved_bytes(memory: Memory, run: Run) -> float:
    """Return the bytes that a step reads and writes at least, if everything else were fused.

    Activations are written and read once; parameters are read in each forward and backward pass; the optimizer reads
    parameters, gradients and its state, and writes parameters and state.
    """
    held = memory.peak.by_kind
    parameters, state = held.get("parameters", 0), held.get("optimizer", 0)
    micro = 2 * held.get("activations", 0) + 2 * parameters
    return run.accumulation * micro + 3 * parameters + 2 * state
