"""Compute a run's memory, step time, traffic and checkpoint size from one simulated step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightswitch.planning.collectives import Collective, Traffic, traffic
from lightswitch.planning.device import Device
from lightswitch.planning.timeline import KINDS, Growth, Kind, Peak

STATES: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")  # states that persist between steps
_MOST_SAMPLES = 2**20  # upper limit of the search for the largest micro-batch


@dataclass(frozen=True)
class Step:
    """Work of one rank in an optimizer step, counted once for its last micro-batch and once for any other one.

    Attributes:
        growth: growth of memory with the samples of a micro-batch.
        samples: size of the micro-batch in which operations and collectives were counted.
        micro_flops: floating-point operations of a micro-batch.
        micro_collectives: collectives of a micro-batch that is not the last of a step.
        last_collectives: collectives of the last micro-batch of a step, with gradient clipping and the optimizer step.
        parameters: number of parameters of the whole model.
        parameter_bytes, optimizer_bytes: size of the whole model's parameters and optimizer state in a checkpoint.
        guessed: number of guessed tensor values in a micro-batch, by the source line that reads them.
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
    """Batch sizes, world size and precision of a run, independent of the strategy.

    Attributes:
        micro_batch, accumulation: samples per device in a micro-batch, and micro-batches per optimizer step.
        replicas: number of data-parallel ranks.
        nodes, devices_per_node: size of the world.
        precision, matmul_precision: as configured.
        param_dtype: torch's name of the dtype in which the strategy computes; None for the dtype of ``precision``.
        steps: optimizer steps of the whole run; None if unlimited.
        tokens_per_sample: None if the data has no tokens.
        disk_gb_per_second: total write speed of all ranks that write a checkpoint.
        global_batch: samples per optimizer step; less than ``micro_batch * accumulation * replicas`` if it does not
            divide evenly.
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
        """Total number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def rounds_weights(self) -> bool:
        """Return whether weights are stored in 16 bits, which loses small updates."""
        return self.precision in ("16-true", "bf16-true")


@dataclass(frozen=True)
class Memory:
    """Memory of a device at its peak in a step, and of the host at its own.

    Attributes:
        peak: tensors on the device.
        runtime_bytes: memory beside tensors; see `Device.runtime_bytes`.
        usable_bytes: memory available to the process on the device.
        host_peak: tensors that the process offloads to the host.
        usable_host_bytes: memory available to the process on the host.
    """

    peak: Peak
    runtime_bytes: float
    usable_bytes: float
    host_peak: Peak
    usable_host_bytes: float

    @property
    def bytes(self) -> float:
        """Total bytes on the device."""
        return self.peak.bytes + self.runtime_bytes

    @property
    def host_bytes(self) -> float:
        """Total bytes on the host."""
        return self.host_peak.bytes

    @property
    def fits(self) -> bool:
        """Return whether the step fits in the memory of the device and of the host."""
        return self.bytes <= self.usable_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Return whether what is offloaded fits in the memory of the host."""
        return self.host_bytes <= self.usable_host_bytes


@dataclass(frozen=True)
class StepTime:
    """Lower bounds of a step's time, each from one resource as if all others were infinitely fast.

    Attributes:
        seconds: lower bound by resource: arithmetic, memory, links in a node, network between nodes, host memory.
    """

    seconds: Mapping[str, float]

    @property
    def bound(self) -> str | None:
        """Resource with the largest lower bound; None if no bound is known."""
        return max(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def least_seconds(self) -> float | None:
        """Largest of the lower bounds; None if no bound is known."""
        return max(self.seconds.values(), default=None)


@dataclass(frozen=True)
class Estimate:
    """Memory, time and traffic of a run under one strategy.

    Attributes:
        words: command-line overrides that select the strategy.
        largest_micro_batch: most samples that fit on the device and the host; None if unknown, 0 if not even one fits.
        flops: floating-point operations of one device in a step.
        checkpoint_bytes: size of one checkpoint, over all ranks.
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
        """Return the upper bound of samples per second, over all devices; None if unknown."""
        seconds = self.time.least_seconds
        return self.run.global_batch / seconds if seconds else None

    @property
    def hours(self) -> float | None:
        """Return the lower bound of the whole run's time in hours; None if unknown."""
        seconds, steps = self.time.least_seconds, self.run.steps
        return seconds * steps / 3600 if seconds and steps else None

    @property
    def save_seconds(self) -> float:
        """Return the seconds that it takes to write a checkpoint."""
        return self.checkpoint_bytes / (self.run.disk_gb_per_second * 1e9)


def estimate(words: tuple[str, ...], step: Step, run: Run, device: Device, on_host: Collection[Kind] = ()) -> Estimate:
    """Return the estimate of a run under a strategy whose step was simulated.

    Args:
        on_host: kinds of memory that are offloaded to the host. On a CPU they stay where they are.
    """
    groups = len({one.ranks for one in (*step.micro_collectives, *step.last_collectives) if len(one.ranks) > 1})
    use = _Use.of(step.growth, () if device.is_host else on_host, device, run.devices_per_node, groups)
    memory = use.at(run.micro_batch)
    sent = _step_traffic(step, run)
    flops = step.micro_flops * run.micro_batch / step.samples * run.accumulation
    return Estimate(
        words,
        run,
        memory,
        use.largest_micro_batch(),
        flops,
        sent,
        step_time(flops, _moved_bytes(memory, run), sent, _host_traffic(memory, run), run, device),
        step.parameters,
        step.parameter_bytes + step.optimizer_bytes,
        step.guessed,
    )


@dataclass(frozen=True)
class _Use:
    """Growth of the memory that a process uses with the samples of a micro-batch.

    Attributes:
        here, there: the growth on the device and on the host, whose peaks are at different moments: gradients that are
            on the host fill it until the backward pass begins, and the device is fullest after that.
        groups: number of process groups in which the process communicates.
    """

    here: Growth
    there: Growth
    device: Device
    devices_per_node: int
    groups: int

    @classmethod
    def of(cls, growth: Growth, on_host: Collection[Kind], device: Device, devices_per_node: int, groups: int) -> _Use:
        """Return the use of memory in a step of which some kinds of memory are on the host."""
        here = growth.only([kind for kind in KINDS if kind not in on_host])
        return cls(here, growth.only(on_host), device, devices_per_node, groups)

    def at(self, samples: int) -> Memory:
        """Return the peak memory with a micro-batch of ``samples`` samples."""
        return self._memory(self.here.at(samples).peak(), self.there.at(samples).peak())

    def largest_micro_batch(self) -> int | None:
        """Return the largest micro-batch that fits; None if the growth of memory is unknown.

        The search is a bisection, because memory grows with the number of samples.
        """
        if not self.here.is_known:
            return None
        low, high = 0, 1
        while high < _MOST_SAMPLES and self._fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, samples: int) -> bool:
        """Return whether `at(samples).fits`, but compute it faster: without the moments of the peaks."""
        here, there = (Peak(growth.peak_bytes(samples), {}, "", "") for growth in (self.here, self.there))
        return self._memory(here, there).fits

    def _memory(self, here: Peak, there: Peak) -> Memory:
        return Memory(
            here,
            self.device.runtime_bytes(here.bytes, self.groups),
            self.device.usable_bytes(self.devices_per_node),
            there,
            self.device.host_bytes(self.devices_per_node),
        )


def step_time(flops: float, moved_bytes: float, sent: Traffic, host_bytes: float, run: Run, device: Device) -> StepTime:
    """Return the lower bounds of a step's time.

    Args:
        moved_bytes: minimum bytes that are read from and written to the device's memory.
        host_bytes: bytes that are copied from the host's memory.
    """
    peak = device.peak_flops(run.param_dtype or run.precision, run.matmul_precision)
    rates = {
        "arithmetic": (flops, peak),
        "memory": (moved_bytes, _per_second(device.memory_gb_per_second)),
        "links in a node": (sent.within, _per_second(device.link_gb_per_second)),
        "network": (sent.between, _per_second(device.network_gb_per_second)),
    }
    if host_bytes:
        rates["host's memory"] = (host_bytes, device.host_gb_per_second * 1e9)
    return StepTime({name: amount / rate for name, (amount, rate) in rates.items() if rate})


def _per_second(gb: float | None) -> float | None:
    return None if gb is None else gb * 1e9


def _step_traffic(step: Step, run: Run) -> Traffic:
    """Return the traffic of a step, summed over its micro-batches."""
    micro = traffic(step.micro_collectives, run.devices_per_node)
    last = traffic(step.last_collectives, run.devices_per_node)
    times = run.accumulation - 1
    return Traffic(times * micro.within + last.within, times * micro.between + last.between)


def _host_traffic(memory: Memory, run: Run) -> float:
    """Return the bytes that a device copies from the host: its shards, for each forward and each backward pass."""
    return 2 * run.accumulation * memory.host_peak.by_kind.get("parameters", 0)


def _moved_bytes(memory: Memory, run: Run) -> float:
    """Return the minimum bytes that a step reads and writes, assuming that everything else is fused.

    Activations are written and read once. Parameters are read in each forward and backward pass. The optimizer reads
    parameters, gradients and its state, and writes parameters and state.
    """
    held = memory.peak.by_kind
    parameters, state = held.get("parameters", 0), held.get("optimizer", 0)
    micro = 2 * held.get("activations", 0) + 2 * parameters
    return run.accumulation * micro + 3 * parameters + 2 * state
