"""Compute what a strategy holds and sends, and the memory and time of a run, from one simulated step of one device.

Parameters, gradients and optimizer state follow from the parameters; activations are those of the simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

from lightswitch.planning.device import Device, World
from lightswitch.planning.ledger import BACKWARD, FORWARD, UPDATE, Trace
from lightswitch.planning.simulation import Simulation, Weight
from lightswitch.strategies.fsdp import FSDP

Kind = Literal[
    "parameters", "gradients", "optimizer", "update", "buffers", "gathered", "communication", "activations", "temporary"
]
_Bytes = np.ndarray[Any, Any]  # by moment
STATES: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")  # held between steps
ON_HOST: tuple[Kind, ...] = (*STATES, "update")  # what offloading moves; an optimizer computes where its state is
_PHASES = (FORWARD, BACKWARD, UPDATE)
_MOST_SAMPLES = 2**20  # a micro-batch of this size counts as one that fits whatever its size
_DEFAULT_BUCKET = 200_000_000  # elements: reduce_bucket_size of Lightning's DeepSpeedStrategy


@dataclass(frozen=True)
class Run:
    """Batch sizes, world size and precision of a run, independent of the strategy.

    Attributes:
        micro_batch, accumulation: samples per device in a micro-batch, and micro-batches per optimizer step.
        precision, matmul_precision: as configured.
        steps: optimizer steps of the whole run; None if unlimited.
        tokens_per_sample: None if the data has no tokens.
        global_batch: samples per optimizer step.
    """

    micro_batch: int
    accumulation: int
    world: World
    precision: str
    matmul_precision: str
    steps: int | None
    tokens_per_sample: int | None
    global_batch: int

    @property
    def rounds_weights(self) -> bool:
        """Return whether weights are stored in 16 bits, which loses small updates."""
        return self.precision in ("16-true", "bf16-true")


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives from others in its node, and that one node receives from other nodes."""

    within: float = 0.0
    between: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.within + other.within, self.between + other.between)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.within * times, self.between * times)

    def of_a_device(self, devices_per_node: int) -> float:
        """Return the bytes that one device receives in all; the devices of a node share what the node receives."""
        return self.within + self.between / devices_per_node


@dataclass(frozen=True)
class Group:
    """Devices that communicate: ``per_node`` on each of ``nodes`` nodes, beside others of the same kind."""

    per_node: float
    nodes: float
    devices_per_node: int

    @property
    def size(self) -> int:
        """Number of devices."""
        return round(self.per_node * self.nodes)

    def gather(self, bytes: float) -> Traffic:
        """Return the least traffic of an all-gather of ``bytes``, or of a reduce-scatter, which is the reverse.

        Each device and each node must receive the bytes that it lacks. An all-reduce is both (Thakur et al. 2005,
        doi:10.1177/1094342005051521).
        """
        beside = self.devices_per_node / self.per_node if self.nodes > 1 else 0  # groups that share a node's network
        within = bytes * (self.per_node - 1) / self.per_node if self.per_node > 1 else 0
        return Traffic(within, beside * bytes * (self.nodes - 1) / self.nodes)


def groups(shards: int, world: World, stride: int = 1) -> tuple[Group, Group]:
    """Return the group that shards over consecutive devices, and the group of its replicas.

    Args:
        stride: number of consecutive ranks that hold the same shard, as under tensor parallelism.
    """
    here = world.devices_per_node
    per_node = max(1.0, min(shards, here / stride))
    shard = Group(per_node, shards / per_node, here)
    replicas = max(1, world.size // (shards * stride))
    of_replicas = max(1.0, min(replicas, here / (shards * stride)))
    return shard, Group(of_replicas, replicas / of_replicas, here)


@dataclass(frozen=True)
class Holding:
    """What a device holds of the parameters under a strategy, and what it sends, in bytes.

    Attributes:
        states: parameters, complete gradients and optimizer state between steps, by kind.
        gradient_share, update_share: share of a reduced gradient, and of what an optimizer computes with.
        unreduced: factors by which gradients of the running backward pass that are not reduced yet count, by their
            names in `Trace.held`.
        gradients: when a complete gradient is held, without accumulation; until cleared: as in one process.
        gathered, communication: by phase (forward, backward, optimizer), and by the unit that runs.
        buckets: what the first gradient of a backward pass allocates, for the pass.
        rounds: whether autocast makes copies of the weights of units.
        in_a_pass, in_a_step: traffic of each micro-batch, and of an optimizer step beside.
        host: bytes by kind that are in the host's memory.
        groups: number of process groups in which it communicates.
        split: number of devices that share a layer, by tensor parallelism. Its activations count as whole.
    """

    states: Mapping[Kind, float]
    gradient_share: float = 1.0
    update_share: float = 1.0
    unreduced: Mapping[str, float] = field(default_factory=dict)
    gradients: Literal["until cleared", "in the backward pass", "always"] = "until cleared"
    gathered: Any = ((0.0,),) * 3
    communication: Any = ((0.0,),) * 3
    buckets: float = 0.0
    rounds: bool = True
    in_a_pass: Traffic = Traffic()
    in_a_step: Traffic = Traffic()
    host: Mapping[Kind, float] = field(default_factory=dict)
    groups: int = 0
    split: int = 1


def holding(step: Simulation, strategy: Strategy, world: World, offloads: bool, precision: str) -> Holding:
    """Return what a device holds and sends under a strategy.

    Args:
        offloads: whether the device has a host whose memory is another one.
    """
    if isinstance(strategy, FSDP):
        return _of_fsdp(step, strategy, world, offloads)
    if isinstance(strategy, DeepSpeedStrategy):
        return _of_zero(step, strategy, world, offloads, precision)
    states, nothing = _states(step.weights), [[0.0] * step.units] * 3
    if not isinstance(strategy, DDPStrategy) or world.size == 1:
        return Holding(states, gathered=nothing, communication=nothing)
    everyone, _ = groups(world.size, world)
    sent = states["gradients"]
    buckets = 0.0 if strategy._ddp_kwargs.get("gradient_as_bucket_view") else sent
    rounded = 0.5 * sent if getattr(strategy, "comm_hook", None) else sent
    return Holding(
        states,
        gathered=nothing,
        communication=[[buckets] * step.units] * 3,
        in_a_step=everyone.gather(rounded) * 2,
        groups=1,
    )


def _states(
    weights: Sequence[Weight], shards: int = 1, split: Mapping[str, int] = MappingProxyType({})
) -> dict[Kind, float]:
    """Return the bytes of parameters, gradients and optimizer state that rank 0 holds, which has the largest shards.

    Args:
        shards: number of devices over which the rows of each parameter are divided.
        split: number of devices that share a layer, by the path of a parameter.
    """
    held: dict[Kind, float] = dict.fromkeys(STATES, 0.0)
    for one in weights:
        share = math.ceil(one.rows / shards) / max(1, one.rows) / split.get(one.path, 1)
        held["parameters"] += share * one.bytes
        held["gradients"] += share * one.bytes * one.is_trained
        held["optimizer"] += share * one.state_bytes
    return held


def _of_fsdp(step: Simulation, strategy: FSDP, world: World, offloads: bool) -> Holding:
    """Return what fully_shard holds: shards, the unit that runs, and buffers of the units before and after it."""
    layer = int(strategy._tensor_parallel_size)
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": strategy.shard_size or world.devices_per_node // layer}.get(
        strategy.sharding_strategy, world.size // layer
    )
    shard, replicas = groups(shards, world, layer)
    split = dict.fromkeys(step.split, layer)
    states, whole = _states(step.weights, shards, split), _states(step.weights)
    policy, gathered, reduced = strategy.mixed_precision, [0.0] * step.units, [0.0] * step.units
    for one in step.weights:
        count, item = one.numel / split.get(one.path, 1), one.bytes / max(1, one.numel)
        own = 2 if one.is_rounded else item
        gathered[one.unit] += count * (policy.param_dtype.itemsize if policy.param_dtype else own)
        sum_dtype = policy.reduce_dtype or policy.param_dtype
        reduced[one.unit] += count * one.is_trained * (sum_dtype.itemsize if sum_dtype else item)
    keeps = strategy.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    held = [sum(gathered) if keeps else gathered[0]]
    held += [gathered[0] + (sum(gathered[1 : n + 1]) if keeps else gathered[n]) for n in range(1, step.units)]
    # What an all-gather has received is copied, and freed once the next one arrives; so is the input of a
    # reduce-scatter. A backward pass gathers the unit before, if that was freed.
    arrived = [gathered[-1], *gathered[1:]]
    before = [0.0] * step.units if keeps else [gathered[-1], 0.0, *gathered[1:-1]][: step.units]
    after = [0.0, *reduced[2:], 0.0][: step.units]
    none = [0.0] * step.units
    buffers = [arrived, [a + b for a, b in zip(before, after, strict=True)]]
    passes = shard.gather(sum(gathered)) + shard.gather(sum(reduced))
    passes += shard.gather(gathered[0] if keeps else sum(gathered))  # again for the backward pass
    passes += replicas.gather(sum(reduced) / shards) * 2
    in_units = sum(one.bytes * one.is_trained for one in step.weights if one.unit)
    rounded = sum(gathered[1:]) / in_units if in_units else 1.0
    dimensions = sum(size > 1 for size in (shard.size, replicas.size, layer))
    return Holding(
        states,
        gradient_share=states["gradients"] / max(1.0, whole["gradients"]),
        update_share=states["parameters"] / max(1.0, whole["parameters"]),
        unreduced={"of_root": 1.0, "of_unit": rounded} if shards > 1 else {},
        gathered=[held, held, none],
        communication=[*buffers, none] if shards > 1 else [none] * 3,
        rounds=False,
        in_a_pass=passes,
        host=states if strategy.cpu_offload and offloads else {},
        groups=dimensions + (dimensions > 1),  # one for each, and that of all ranks
        split=layer,
    )


def _of_zero(step: Simulation, strategy: DeepSpeedStrategy, world: World, offloads: bool, precision: str) -> Holding:
    """Return what DeepSpeed 0.19 holds: flat shards of the states, whole parameters before stage 3, and buckets."""
    zero = (strategy.config or {}).get("zero_optimization", {})
    stage, parts = int(zero.get("stage", 2)), world.size
    is_offloaded = {name: offloads and bool(zero.get(f"offload_{name}")) for name in ("optimizer", "param")}
    whole = _states(step.weights)
    trained = sum(one.numel for one in step.weights if one.is_trained)
    largest = max((one.numel for one in step.weights), default=0)
    own = whole["parameters"] / max(1, sum(one.numel for one in step.weights))  # bytes of an element
    item = 2 if precision.startswith("16") else own
    in_16_bits = precision == "bf16-true" and not is_offloaded["optimizer"]  # else, the optimizer steps 32-bit copies
    copy = item if in_16_bits else max(4, item)
    moments = whole["optimizer"] / max(1, trained) * (1 if in_16_bits else max(1, 4 / own))
    parameters = item * sum(one.numel for one in step.weights)
    states: dict[Kind, float] = {
        "parameters": parameters / parts if stage == 3 else parameters,
        "gradients": item * trained / (1 if stage == 1 else parts),
        "optimizer": (moments + copy) * trained / parts,
    }
    host: dict[Kind, float] = {}
    bucket = item * int(zero.get("reduce_bucket_size") or _DEFAULT_BUCKET)
    kept, gathered = 0.0, [0.0] * step.units
    if stage == 3:  # parameters are gathered module by module
        kept, gathered = (
            bucket,
            [item * max((w.numel for w in step.weights if w.unit == n), default=0) for n in range(step.units)],
        )
    if is_offloaded["optimizer"]:
        host |= {"optimizer": states["optimizer"], "gradients": (4 + item) * trained / parts}
        if stage < 3:
            host["update"] = item * largest  # buffers through which the gradients pass
            kept += item * largest
    if is_offloaded["param"] and stage == 3:
        host["parameters"] = states["parameters"]
    everyone, _ = groups(parts, world)
    of_gradients, of_parameters = everyone.gather(item * trained), everyone.gather(parameters)
    return Holding(
        states,
        gradient_share=1.0 if stage == 1 else 1 / parts,
        update_share=1 / parts,
        unreduced={} if stage == 1 else {"newest": 1.0},
        gradients="always" if stage == 3 else "in the backward pass",
        gathered=[gathered, gathered, [0.0] * step.units],
        communication=[[kept] * step.units] * 3,
        buckets=2 * bucket if stage < 3 else 0.0,
        in_a_pass=(Traffic(), of_gradients * 2, of_parameters + of_gradients)[stage - 1],
        in_a_step=(of_gradients * 2 + of_parameters, of_parameters, Traffic())[stage - 1],
        host=host,
        groups=1,
    )


@dataclass(frozen=True)
class Peak:
    """Peak memory of a device in a step.

    Attributes:
        by_kind: bytes by kind, which add up to ``bytes``.
        phase, place: phase of the step, and path of the running module.
    """

    by_kind: Mapping[Kind, float]
    phase: str = ""
    place: str = ""

    @property
    def bytes(self) -> float:
        """Total bytes."""
        return sum(self.by_kind.values())


class Growth:
    """Memory of a device by the samples of a micro-batch.

    The bytes of each storage are affine in the number of samples. The peak is not, because it may move to another
    moment, so it is taken from all moments. If a step runs different operations at another size, for example because
    its loss is computed in chunks, moments do not correspond, and the two peaks are extrapolated instead.
    """

    def __init__(self, step: Simulation, holding: Holding, accumulation: int) -> None:
        first, second = step.traces
        one, other = (_by_kind(trace, holding, accumulation) for trace in step.traces)
        self._at = list(range(len(first.places)))
        if len(first.places) != len(second.places):
            peaks = [int(_total(kinds).argmax()) for kinds in (one, other)]
            one = {kind: bytes[peaks[0]].reshape(1) for kind, bytes in one.items()}
            other = {kind: bytes[peaks[1]].reshape(1) for kind, bytes in other.items()}
            self._at = peaks[:1]
        more = step.samples[1] - step.samples[0]
        self._trace, self._samples, self._one, self.is_known = first, step.samples[0], one, more > 0
        self._slope = {kind: (other[kind] - one[kind]) / max(1, more) for kind in one}

    def peak(self, samples: int) -> Peak:
        """Return the peak with a micro-batch of ``samples`` samples."""
        held = {kind: one + (samples - self._samples) * self._slope[kind] for kind, one in self._one.items()}
        at = int(_total(held).argmax())
        by_kind = {kind: float(bytes[at]) for kind, bytes in held.items() if bytes[at] > 0}
        return Peak(by_kind, str(self._trace.phases[self._at[at]]), self._trace.places[self._at[at]])

    def most(self, bytes: float) -> int:
        """Return the largest number of samples with which the peak takes at most ``bytes``; 0 if there is none."""
        slope = _total(self._slope)
        room = bytes - _total(self._one) + self._samples * slope
        if (room < 0).any():
            return 0
        return int(min(_MOST_SAMPLES, (room[slope > 0] / slope[slope > 0]).min(initial=_MOST_SAMPLES)))


def _total(by_kind: Mapping[Kind, _Bytes]) -> _Bytes:
    total: _Bytes = np.sum(list(by_kind.values()), axis=0)
    return total


def _by_kind(trace: Trace, holding: Holding, accumulation: int) -> dict[Kind, _Bytes]:
    """Return the bytes that a device holds at each moment of a step, by kind."""
    held, none = trace.held, np.zeros(len(trace.places))
    phase = np.array([_PHASES.index(name) for name in trace.phases])
    on_device = {kind: none if kind in holding.host else none + bytes for kind, bytes in holding.states.items()}
    gradients = on_device["gradients"]
    if "gradients" not in holding.host and accumulation == 1 and holding.gradients != "always":
        gradients = holding.gradient_share * held["gradients"]
        if holding.gradients == "in the backward pass":
            gradients = np.where(phase == 0, 0.0, gradients)
    unreduced = holding.unreduced or ({"newest": 1.0} if accumulation > 1 else {})
    by_unit = (phase, trace.units)
    return {
        **on_device,
        "gradients": gradients + sum((factor * held[name] for name, factor in unreduced.items()), start=none),
        "update": none if "optimizer" in holding.host else holding.update_share * held["update"],
        "buffers": held["buffers"],
        "gathered": np.array(holding.gathered)[by_unit],
        "communication": np.array(holding.communication)[by_unit] + holding.buckets * (held["newest"] > 0),
        "activations": held["batch"] + held["activations"] + holding.rounds * held["casts"],
        "temporary": held["temporary"],
    }


@dataclass(frozen=True)
class Memory:
    """Memory of a device at its peak in a step, and of the host.

    Attributes:
        peak: tensors on the device.
        runtime_bytes: memory beside tensors; see `Device.runtime_bytes`.
        usable_bytes, usable_host_bytes: memory available to the process on the device, and on the host.
        host_bytes: tensors that the process offloads to the host.
    """

    peak: Peak
    runtime_bytes: float
    usable_bytes: float
    host_bytes: float
    usable_host_bytes: float

    @property
    def bytes(self) -> float:
        """Total bytes on the device."""
        return self.peak.bytes + self.runtime_bytes

    @property
    def fits(self) -> bool:
        """Return whether the step fits in the memory of the device and of the host."""
        return self.bytes <= self.usable_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Return whether what is offloaded fits in the memory of the host."""
        return self.host_bytes <= self.usable_host_bytes


@dataclass(frozen=True)
class Estimate:
    """Memory, time and traffic of a run under one strategy.

    Attributes:
        words: command-line overrides that select the strategy.
        largest_micro_batch: most samples that fit on the device and the host; None if unknown, 0 if not even one fits.
        flops: floating-point operations of one device in a step.
        seconds: lower bounds of a step's time by resource, each as if all others were infinitely fast.
        checkpoint_bytes: size of one checkpoint, over all ranks.
        replaced: number of values that a micro-batch reads from tensors, by source line.
    """

    words: tuple[str, ...]
    run: Run
    memory: Memory
    largest_micro_batch: int | None
    flops: float
    traffic: Traffic
    seconds: Mapping[str, float]
    checkpoint_bytes: float
    replaced: Mapping[str, int] = field(default_factory=dict)

    @property
    def bound(self) -> str | None:
        """Resource with the largest lower bound; None if no bound is known."""
        return max(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def least_seconds(self) -> float | None:
        """Largest of the lower bounds of a step's time; None if no bound is known."""
        return max(self.seconds.values(), default=None)

    @property
    def samples_per_second(self) -> float | None:
        """Return the upper bound of samples per second, over all devices; None if unknown."""
        return self.run.global_batch / self.least_seconds if self.least_seconds else None

    @property
    def hours(self) -> float | None:
        """Return the lower bound of the whole run's time in hours; None if unknown."""
        return self.least_seconds * self.run.steps / 3600 if self.least_seconds and self.run.steps else None


def estimate(words: tuple[str, ...], step: Simulation, held: Holding, run: Run, device: Device) -> Estimate:
    """Return the estimate of a run under a strategy that holds and sends this."""
    growth = Growth(step, held, run.accumulation)
    peak, usable = growth.peak(run.micro_batch), device.usable_bytes(run.world.devices_per_node)
    host, usable_host = sum(held.host.values()), device.host_bytes(run.world.devices_per_node)
    memory = Memory(peak, device.runtime_bytes(peak.bytes, held.groups), usable, host, usable_host)
    most = growth.most(device.tensor_bytes(usable, held.groups)) if memory.fits_host else 0
    flops = step.flops / held.split * run.micro_batch / step.samples[0] * run.accumulation
    sent = held.in_a_pass * run.accumulation + held.in_a_step
    # at least: activations are written and read once; parameters are read in each pass; the optimizer reads and writes
    states = {kind: peak.by_kind.get(kind, 0.0) for kind in ("parameters", "optimizer", "activations")}
    moved = 2 * run.accumulation * (states["activations"] + states["parameters"])
    moved += 3 * states["parameters"] + 2 * states["optimizer"]
    copied = 2 * run.accumulation * held.host.get("parameters", 0.0)
    rates = {
        "arithmetic": (flops, device.peak_flops(run.precision, run.matmul_precision)),
        "memory": (moved, device.memory_gb_per_second and device.memory_gb_per_second * 1e9),
        "links in a node": (sent.within, device.link_gb_per_second and device.link_gb_per_second * 1e9),
        "network": (sent.between, device.network_gb_per_second and device.network_gb_per_second * 1e9),
        **({"host's memory": (copied, device.host_gb_per_second * 1e9)} if copied else {}),
    }
    whole = _states(step.weights)
    return Estimate(
        words,
        run,
        memory,
        most if growth.is_known else None,
        flops,
        sent,
        {name: amount / rate for name, (amount, rate) in rates.items() if rate},
        whole["parameters"] + whole["optimizer"],
        step.replaced,
    )
