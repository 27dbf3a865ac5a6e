"""Simulate single ranks of a run, and format the findings of a dry run as text and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import listed
from lightswitch.monitoring.display import aligned, compact
from lightswitch.planning import report
from lightswitch.planning.collectives import Exchange
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import Estimate, Step
from lightswitch.planning.fakes import World
from lightswitch.planning.report import size
from lightswitch.planning.samples import Reads
from lightswitch.planning.simulation import Work, simulate
from lightswitch.planning.timeline import Kind

_SHOWN_SAMPLES = 8
_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations")

SHARD, REPLICATE = "shard", "replicate"


@dataclass(frozen=True)
class Rehearsed:
    """One simulated rank, with its estimate, traffic and samples.

    Attributes:
        sent: its collectives in one step.
        reads: the first samples that it reads from each training loader.
    """

    rank: Rank
    estimate: Estimate
    sent: tuple[Exchange, ...]
    reads: tuple[Reads, ...] = ()


@dataclass(frozen=True)
class DryRun:
    """Findings of a dry run.

    Attributes:
        strategy: name of the strategy and the precision.
        ranks: the simulated ranks, rank 0 first.
        script: the sections of the job script with their contents; empty if there is no job script.
        commands: the command that starts the run, by launcher.
    """

    strategy: str
    device: Device
    batch: BatchPlan
    ranks: tuple[Rehearsed, ...]
    script: Mapping[str, str]
    commands: Mapping[str, str]

    @property
    def first(self) -> Rehearsed:
        """Rank 0."""
        return self.ranks[0]


def page(dry_run: DryRun) -> str:
    """Format a dry run as text, in sections with their names on the left."""
    sections = {
        "world": _world(dry_run),
        "batch": [str(dry_run.batch)],
        "mesh": _mesh(dry_run),
        "units": _units(dry_run),
        "samples": _samples(dry_run),
        "collectives": _collectives(dry_run),
        "memory": _memory(dry_run),
        "checkpoint": _checkpoint(dry_run.first.estimate),
        "job script": [f"{part:<9} {text}" for part, text in dry_run.script.items()],
        "commands": [f"{launcher:<9} {text}" for launcher, text in dry_run.commands.items()],
    }
    return "\n\n".join(_section(name, lines) for name, lines in sections.items() if lines)


def _section(name: str, lines: Sequence[str]) -> str:
    return "\n".join(f"{name if index == 0 else '':<12} {line}".rstrip() for index, line in enumerate(lines))


def _world(dry_run: DryRun) -> list[str]:
    world = dry_run.first.rank.world
    where = f"{world.nodes} node{'s' if world.nodes > 1 else ''} × {world.devices_per_node} {dry_run.device.name}"
    count = f"{world.size} ranks" if world.size > 1 else "one rank"
    lines = [f"{where} = {count}, {dry_run.strategy}"]
    for one in dry_run.ranks[1:]:
        node, device = divmod(one.rank.number, world.devices_per_node)
        lines.append(f"rank {one.rank.number} is device {device} of node {node}, from 0")
    return lines


def _mesh(dry_run: DryRun) -> list[str]:
    axes = [axis for axis in dry_run.first.rank.axes if axis.size > 1]
    if not axes:
        return []
    lines = [" × ".join(f"{axis.name} {axis.size}" for axis in axes)]
    for one in dry_run.ranks:
        groups = [f"{axis.name} with {span(axis.ranks)}" for axis in one.rank.axes if axis.size > 1]
        lines.append(f"rank {one.rank.number:<5} {', '.join(groups)}")
    return lines


def _units(dry_run: DryRun) -> list[str]:
    rows = [("", "", "parameters", "bytes", *(f"rank {one.rank.number}" for one in dry_run.ranks))]
    alike: Counter[tuple[str, ...]] = Counter()
    for of_ranks in zip(*(one.rank.units for one in dry_run.ranks), strict=True):
        unit = of_ranks[0]
        kind = unit.kind if unit.path or len(dry_run.first.rank.units) == 1 else f"{unit.kind}, the rest"
        held = (size(one.rank_bytes) for one in of_ranks)
        alike[(kind, compact(unit.parameters), size(unit.bytes), *held)] += 1
    rows += [(f"{count} ×", *row) for row, count in alike.items()]
    return aligned(rows, (1,))


def _samples(dry_run: DryRun) -> list[str]:
    lines = []
    for number, reads in enumerate(dry_run.first.reads):
        which = f"loader {number}: " if len(dry_run.first.reads) > 1 else ""
        if reads.why_not:
            lines.append(f"{which}not known, because {reads.why_not}")
            continue
        lines.append(f"{which}{reads.samples} per epoch; the first steps read, by rank and micro batch")
        for step in range(len(reads.steps)):
            for one in dry_run.ranks:
                micro = " | ".join(_indices(indices) for indices in one.reads[number].steps[step][:2])
                more = len(reads.steps[step]) - 2
                rest = f" | {more} more" if more > 0 else ""
                lines.append(f"step {step}  rank {one.rank.number:<5} {micro}{rest}")
    return lines


def _indices(indices: Sequence[Any]) -> str:
    return listed([str(index) for index in indices], shown=_SHOWN_SAMPLES)


def _collectives(dry_run: DryRun) -> list[str]:
    rows = [("rank", "a step", "", "sent", "over")]
    for one in dry_run.ranks:
        for exchange in one.sent:
            over = f"{len(exchange.ranks)} ranks: {span(exchange.ranks)}"
            rows.append((str(one.rank.number), f"{exchange.count} ×", exchange.name, size(exchange.bytes), over))
    return aligned(rows, (1, 2, 4)) if len(rows) > 1 else []


def _memory(dry_run: DryRun) -> list[str]:
    unit = report.unit_of(max(one.estimate.memory.bytes for one in dry_run.ranks))
    rows: list[tuple[str, ...]] = [("rank", unit, "fits", *_KINDS, "other")]
    for one in dry_run.ranks:
        memory = one.estimate.memory
        shown = [memory.peak.by_kind.get(kind, 0.0) for kind in _KINDS]
        rest = memory.bytes - sum(shown)
        fits = "yes" if memory.fits else "no"
        sizes = (report.number(bytes, unit) for bytes in (memory.bytes, *shown, rest))
        total, *parts = sizes
        rows.append((str(one.rank.number), total, fits, *parts))
    usable = report.amount(dry_run.first.estimate.memory.usable_bytes)
    guessed = report.guessed(dry_run.first.estimate)
    return [*aligned(rows), f"of {usable} on {dry_run.device.name}", *([f"guessed {guessed}"] if guessed else [])]


def _checkpoint(estimate: Estimate) -> list[str]:
    speed = estimate.run.disk_gb_per_second
    return [f"{size(estimate.checkpoint_bytes)} over all ranks, {estimate.save_seconds:.3g} s at {speed:g} GB/s"]


def span(ranks: Sequence[int]) -> str:
    """Format ranks in short form: `0 to 7`, `5, 13, 21 … 1021`."""
    if len(ranks) > 2 and len({second - first for first, second in pairwise(ranks)}) == 1:
        if ranks[1] - ranks[0] == 1:
            return f"{ranks[0]} to {ranks[-1]}"
        return f"{ranks[0]}, {ranks[1]}, {ranks[2]} … {ranks[-1]}" if len(ranks) > 4 else _all(ranks)
    return _all(ranks) if len(ranks) <= 8 else f"{_all(ranks[:4])} … {ranks[-1]}"


def _all(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def as_data(dry_run: DryRun) -> dict[str, Any]:
    """Return the complete dry run as plain data, in bytes, seconds and operations."""
    world = dry_run.first.rank.world
    return {
        "world": {"nodes": world.nodes, "devices_per_node": world.devices_per_node, "ranks": world.size},
        "strategy": dry_run.strategy,
        "device": asdict(dry_run.device),
        "batch": asdict(dry_run.batch),
        "mesh": {axis.name: axis.size for axis in dry_run.first.rank.axes},
        "ranks": {str(one.rank.number): dict(_rank_data(one)) for one in dry_run.ranks},
        "job_script": dict(dry_run.script),
        "commands": dict(dry_run.commands),
        "estimate": report.of_estimate(dry_run.first.estimate),
    }


def _rank_data(one: Rehearsed) -> Iterator[tuple[str, Any]]:
    rank = one.rank
    yield "node", rank.number // rank.world.devices_per_node
    yield "device", rank.number % rank.world.devices_per_node
    yield "data_rank", rank.data_rank
    yield "groups", {axis.name: {"position": axis.position, "ranks": axis.ranks} for axis in rank.axes}
    yield "units", [asdict(unit) for unit in rank.units]
    yield (
        "samples",
        [{"why_not": reads.why_not, "an_epoch": reads.samples, "steps": reads.steps} for reads in one.reads],
    )
    yield "collectives", [asdict(exchange) for exchange in one.sent]
    yield "memory", report.of_estimate(one.estimate)


@dataclass(frozen=True)
class Axis:
    """One dimension of the device mesh, as seen by a rank.

    Attributes:
        position: the rank's coordinate along the dimension.
        ranks: the ranks, including this one, that share its coordinates in all other dimensions, in order.
    """

    name: str
    size: int
    position: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Module whose parameters are gathered together, or the whole model if it is not sharded.

    Attributes:
        path: path in the model; empty for the root, which has the parameters of no other unit.
        kind: class name of the module.
        parameters: number of parameters in the unit, over all ranks.
        bytes, rank_bytes: size of all its parameters, and of this rank's shard.
    """

    path: str
    kind: str
    parameters: int
    bytes: int
    rank_bytes: int


@dataclass(frozen=True)
class Rank:
    """A rank after its simulated steps.

    Attributes:
        data_rank: data-parallel rank.
        axes: dimensions of the device mesh, the outermost first; empty for a single device.
    """

    world: World
    data_rank: int
    axes: tuple[Axis, ...]
    units: tuple[Unit, ...]

    @property
    def number(self) -> int:
        """Global rank."""
        return self.world.rank


def rehearse(work: Work, strategy: Strategy, world: World) -> tuple[Rank, Step]:
    """Simulate a rank under a strategy, and return its place in the world and its step.

    torch caches shardings by mesh, with the process groups of the first rank, so a process can simulate only one rank.

    Raises:
        NeedsValues, Refused: see `simulate`.
    """
    seen: dict[str, Any] = {}

    def look(trainer: Trainer) -> None:
        strategy = trainer.strategy
        seen["data_rank"] = int((trainer.distributed_sampler_kwargs or {}).get("rank", 0))
        seen["axes"] = tuple(_axes(strategy, world))
        seen["units"] = tuple(_units_of(trainer.lightning_module))

    step = simulate(work, strategy, world, look)
    return Rank(world=world, **seen), step


def _axes(strategy: Strategy, world: World) -> Iterator[Axis]:
    if isinstance(strategy, ModelParallelStrategy):
        mesh = strategy.device_mesh
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(name)))
            yield Axis(name, size, ranks.index(world.rank), ranks)
    elif isinstance(strategy, DDPStrategy):
        name = SHARD if isinstance(strategy, DeepSpeedStrategy) else REPLICATE  # ZeRO shards over all ranks
        yield Axis(name, world.size, world.rank, tuple(range(world.size)))


def _units_of(model: nn.Module) -> Iterator[Unit]:
    """Yield the units, outer before inner; a unit excludes the parameters of units nested in it."""
    counted: set[nn.Parameter] = set()
    found: list[Unit] = []
    for path, module in reversed(list(model.named_modules())):
        if module is model or isinstance(module, FSDPModule):
            assert isinstance(module, nn.Module)
            own = [parameter for parameter in module.parameters() if parameter not in counted]
            counted.update(own)
            found.append(_unit(path, module, own))
    yield from reversed(found)


def _unit(path: str, module: nn.Module, own: list[nn.Parameter]) -> Unit:
    return Unit(path, _kind(module), _count(own), _bytes(own), sum(_kept(parameter).nbytes for parameter in own))


def _kept(parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter._local_tensor
    part: Tensor = getattr(parameter, "ds_tensor", parameter)  # the shard under ZeRO 3
    return part


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # fully_shard adds this prefix to the class name


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(_numel(parameter) for parameter in parameters)


def _bytes(parameters: list[nn.Parameter]) -> int:
    return sum(_numel(parameter) * parameter.dtype.itemsize for parameter in parameters)


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # between steps, ZeRO 3 holds only shards
