"""What a run takes on a device, from one simulated step: memory, time, traffic, a checkpoint. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightswitch.planning.collectives import Collective, Traffic, traffic
from lightswitch.planning.device import Device
from lightswitch.planning.timeline import Growth, Kind, Peak

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
