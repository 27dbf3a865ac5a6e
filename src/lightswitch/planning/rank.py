"""One rank of a world: its place in the mesh, what it keeps of each unit, and what it stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightswitch.checkpoints import names
from lightswitch.planning.estimate import Step
from lightswitch.planning.fakes import World
from lightswitch.planning.simulation import Work, simulate
from lightswitch.strategies.fsdp1 import FSDP1

SHARD, REPLICATE = "shard", "replicate"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as a rank sees it.

    Attributes:
        position: of the rank on it.
        ranks: that differ from this one in this axis alone, in order.
    """

    name: str
    size: int
    position: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered at once, or the model as one.

    Attributes:
        path: in the model; empty for its root, with all that is in no other unit.
        kind: its class.
        parameters: by number, of the whole unit.
        bytes, rank_bytes: of them all, and of those that this rank keeps.
    """

    path: str
    kind: str
    parameters: int
    bytes: int
    rank_bytes: int


@dataclass(frozen=True)
class Rank:
    """A rank, after its first steps.

    Attributes:
        data_rank: its number among those that read different samples.
        axes: of the mesh, the outermost first; none for one device.
    """

    world: World
    data_rank: int
    axes: tuple[Axis, ...]
    units: tuple[Unit, ...]

    @property
    def number(self) -> int:
        """Number of the rank in the world."""
        return self.world.rank


def rehearse(work: Work, strategy: Strategy, world: World) -> tuple[Rank, Step]:
    """Return what a rank of a world is, and its step, under a strategy.

    torch keeps shardings by their mesh, with the process groups of the rank that came first: a process is good for one
    rank alone.

    Raises:
        NeedsValues, Refused: see `simulate`.
    """
    seen: dict[str, Any] = {}

    def look(trainer: Trainer) -> None:
        strategy = trainer.strategy
        seen["data_rank"] = int((trainer.distributed_sampler_kwargs or {}).get("rank", 0))
        seen["axes"] = tuple(_axes(strategy, world))
        seen["units"] = tuple(_units(strategy, trainer.lightning_module))

    step = simulate(work, strategy, world, look)
    return Rank(world=world, **seen), step


def _axes(strategy: Strategy, world: World) -> Iterator[Axis]:
    mesh = _mesh(strategy)
    if mesh is not None:
        for name, size in zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True):
            group = mesh.get_group(name if mesh.mesh_dim_names else 0)
            ranks = tuple(dist.get_process_group_ranks(group))
            yield Axis(name, size, ranks.index(world.rank), ranks)
    elif isinstance(strategy, DDPStrategy | FSDP1):
        name = SHARD if isinstance(strategy, DeepSpeedStrategy) else REPLICATE  # ZeRO cuts what it cuts over all
        yield Axis(name, world.size, world.rank, tuple(range(world.size)))


def _mesh(strategy: Strategy) -> DeviceMesh | None:
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh
    return strategy._mesh if isinstance(strategy, FSDP1) else None


def _units(strategy: Strategy, model: nn.Module) -> Iterator[Unit]:
    """Yield the units, outer before inner, each without those inside of it."""
    root = strategy.model or model
    if isinstance(strategy, FSDP1):
        for path, module in root.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                yield _flat_unit(names.own_name(f"{path}.").strip("."), module)
        return
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
    part: Tensor = getattr(parameter, "ds_tensor", parameter)  # of ZeRO 3
    return part


def _flat_unit(path: str, module: FullyShardedDataParallel) -> Unit:
    """Return a unit of FSDP1, whose parameters are one flat one."""
    handle = module._handle
    if handle is None:  # it has none of its own
        return Unit(path, _kind(module.module), 0, 0, 0)
    flat = handle.flat_param
    size, count = flat.dtype.itemsize, sum(shape.numel() for shape in flat._shapes)
    return Unit(path, _kind(module.module), count, count * size, flat._sharded_size.numel() * size)


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # which fully_shard puts before it


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(_numel(parameter) for parameter in parameters)


def _bytes(parameters: list[nn.Parameter]) -> int:
    return sum(_numel(parameter) * parameter.dtype.itemsize for parameter in parameters)


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO 3 has parts alone, between two steps
