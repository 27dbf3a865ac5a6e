"""Equal replicas: rank 0's initial values on every rank, and comparisons during the run."""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary
from torchmetrics import Metric

from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import local
from lightswitch.errors import UnequalReplicas, listed
from lightswitch.strategies.writes import FIRST_STEP_ALONE

log = logging.getLogger(__name__)


def broadcast_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's tensor as a new one on the device. Collective.

    Args:
        tensor: has the same shape and dtype on every rank; on ranks other than 0, it may be on the meta device.
    """
    if dist.get_rank() == 0:
        value = tensor.detach().to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(value.flatten().view(torch.uint8), src=0)  # as bytes: NCCL and gloo do not support every dtype
    return value


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place with rank 0's. Collective.

    Tensors of one dtype and device are sent together, in a concatenated copy.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    for (_, device), group in alike.items():
        values = broadcast_tensor(torch.cat([tensor.flatten() for tensor in group]), device)
        for tensor, value in zip(group, torch.split(values, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(value.view(tensor.shape))


def broadcast_weights(modules: Iterable[nn.Module], device: torch.device, done: set[nn.Module]) -> None:
    """Replace the direct parameters and buffers of modules with rank 0's, on each rank's device. Collective.

    Args:
        modules: modules to fill, which may be on the meta device on ranks other than 0.
        done: modules to skip, because they have rank 0's values already; the filled modules are added.
    """
    replaced: dict[Tensor, Tensor] = {}  # a tied parameter stays tied
    for part in [module for module in modules if module not in done]:
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(broadcast_tensor(parameter, device), parameter.requires_grad)
            setattr(part, name, replaced[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, broadcast_tensor(buffer, device))
        done.add(part)


def broadcast_metric_states(module: nn.Module, device: torch.device) -> None:
    """Replace the states of metrics, which are neither parameters nor buffers, with rank 0's. Collective."""
    for part in module.modules():
        if isinstance(part, Metric):
            part._apply(lambda tensor: broadcast_tensor(tensor, device))


def left_on_meta(module: nn.Module) -> list[str]:
    """Return the names of plain tensor attributes on the meta device, which nothing moves to a device."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers") and not isinstance(part, Metric)
        if any(tensor.is_meta for tensor in _tensors(value))
    ]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        yield from (item for item in items if isinstance(item, Tensor))


@contextmanager
def placeholders() -> Iterator[None]:
    """Context in which new modules have their parameters on the meta device, where they take no memory.

    Under `torch.device("meta")`, plain tensors and the states of metrics would be on the meta device, too, and stay
    there.
    """
    replaced = WeakIdKeyDictionary()  # a tied parameter stays tied

    def placeholder(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if parameter not in replaced:
            replaced[parameter] = _like(parameter, "meta")
        return cast(nn.Parameter, replaced[parameter])

    hook = register_module_parameter_registration_hook(placeholder)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        hook.remove()


def fill_with_nothing(module: nn.Module) -> None:
    """Turn placeholders into uninitialized CPU parameters, whose memory is allocated when it is first written."""
    for parameter in module.parameters():
        if parameter.is_meta:
            torch.utils.swap_tensors(parameter, _like(parameter, "cpu"))  # type: ignore[no-untyped-call]  # untyped in torch


def _like(parameter: nn.Parameter, device: str) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes that models set on their parameters
    return made


_FIRST_BATCHES = 3  # replicas are compared after each of these, and at each save
_ROUNDING = 1e-6  # relative tolerance: different machines may round differently
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_BASE = 0x5851F42D4C957F2D  # odd number, whose powers distinguish blocks
_BLOCK = 1 << 20  # elements hashed at once: a whole tensor of wide integers may not fit in memory beside the tensor


class EqualReplicas(Callback):
    """Callback that compares copies of parameters on different ranks, after the first three batches and at each save.

    A parameter that differs ends the run, because a checkpoint holds rank 0's copy. Buffers may differ: batch norms
    take statistics of their rank's samples, and DDP broadcasts rank 0's before each forward pass. Other buffers that
    differ are logged once.
    """

    def __init__(self) -> None:
        self._ends_runs = True
        self._batches = 0
        self._told_of_buffers = False

    def only_report(self) -> None:
        """Let a run continue even if parameters differ."""
        self._ends_runs = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if 0 < self._batches <= _FIRST_BATCHES:
            self._compare(trainer, pl_module)
        self._batches += 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._compare(trainer, pl_module)

    def _compare(self, trainer: Trainer, module: LightningModule) -> None:
        """Compare replicas. Collective.

        Raises:
            UnequalReplicas: parameters differ; raised on every rank.
        """
        strategy = trainer.strategy
        if trainer.world_size == 1 or not isinstance(strategy, PortableCheckpoints):
            return
        parameters = {name: held for name, held in strategy.local_parameters().items() if isinstance(held, Tensor)}
        buffers = {names.own_name(name): buffer for name, buffer in module.named_buffers()}
        unequal = differing({**parameters, **buffers}, strategy.root_device)
        if self._ends_runs and (found := [name for name in unequal if name in parameters]):
            ranks = sorted({rank for name in found for rank in unequal[name]})
            raise UnequalReplicas(
                f"{listed(found)} of rank {listed([str(rank) for rank in ranks])} differs from rank 0 after step "
                f"{trainer.global_step}: each rank changes it independently, as in a hook that draws random numbers or "
                "reads the rank's samples; compute it on rank 0 and broadcast it, or from the samples of all ranks "
                f"(self.all_gather). If the first batch alone sets it, {FIRST_STEP_ALONE}. type mode=check to see where"
            )
        if not self._told_of_buffers and (found := _without_statistics(unequal, module)) and trainer.is_global_zero:
            self._told_of_buffers = True
            log.warning(
                "buffers    %s differs between ranks; evaluation and checkpoints use rank 0's. To compute it as one "
                "process does, gather its inputs over ranks first (self.all_gather)", listed(found),
            )  # fmt: skip


def differing(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, list[int]]:
    """Return, by name, the ranks whose copy of a tensor or shard differs from the first rank's copy of the same shard.
    Collective.

    Args:
        tensors: tensors by name, with the same names on each rank.
        device: device for communication.
    """
    held = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor) or _is_copied(tensor)}
    if not held:
        return {}
    shards = [_shard(tensor) for tensor in held.values()]
    drawn = _weights(min(_BLOCK, max(2 * local(tensor).numel() for tensor in held.values())))  # complex ones take two
    weights = {there: drawn.to(there) for there in {local(tensor).device for tensor in held.values()}}
    sums = torch.stack([_bits(local(tensor), weights[local(tensor).device]).to(device) for tensor in held.values()])
    own = torch.stack([torch.tensor(shards, device=device), sums], dim=1)  # (tensors, 2)
    unequal = {
        name: ranks
        for name, ranks in zip(held, map(_others, _of_ranks(own).transpose(0, 1).tolist()), strict=True)
        if ranks
    }
    if not unequal:
        return {}
    # sums and sums of absolute values: (tensors, 2)
    values = torch.stack([_sums(local(held[name])).to(device) for name in unequal])
    return {
        name: far
        for (name, ranks), found in zip(unequal.items(), _of_ranks(values).transpose(0, 1).tolist(), strict=True)
        if (far := [rank for rank, first in ranks.items() if not _is_near(found[rank], found[first])])
    }


def _is_copied(tensor: DTensor) -> bool:
    return any(placement.is_replicate() for placement in tensor.placements)


def _shard(tensor: Tensor) -> int:
    """Return a number that is equal on ranks with the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    boxes = [(tuple(box.offsets), tuple(box.sizes)) for box in tensor.__create_chunk_list__()]  # type: ignore[no-untyped-call]  # untyped in torch
    return zlib.crc32(repr(boxes).encode())


@torch.no_grad()
def _bits(tensor: Tensor, weights: Tensor) -> Tensor:
    """Return a hash of a tensor's elements and their order.

    It reads elements as integers, and sums them with random weights, modulo 2⁶⁴. A plain sum is equal for many tensors
    that differ: the biases of two classes mirror each other, so an equal change of both adds to the integer of one what
    it subtracts from the other's.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in torch.split(flat.view(_INTEGERS[flat.itemsize]), _BLOCK):
        total = total * _BASE + (block * weights[: len(block)]).sum()
    return total


def _weights(count: int) -> Tensor:
    """Return the first weights of a random sequence that is equal on all ranks; odd, so that products lose no bits."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (count,), generator=torch.Generator().manual_seed(0))
    return 2 * drawn + 1


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    wide = (torch.view_as_real(flat) if flat.is_complex() else flat).to(torch.float64)
    return torch.stack([wide.sum(), wide.abs().sum()])


def _of_ranks(own: Tensor) -> Tensor:
    """Return the stacked tensors of all ranks: (ranks, …). Collective."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered)


def _others(ranks: list[list[int]]) -> dict[int, int]:
    """Return the ranks whose hash differs from that of the first rank with the same shard, each with that first rank.

    Args:
        ranks: each rank's shard number and hash.
    """
    first: dict[int, tuple[int, int]] = {}
    for rank, (shard, bits) in enumerate(ranks):
        first.setdefault(shard, (rank, bits))
    return {rank: first[shard][0] for rank, (shard, bits) in enumerate(ranks) if first[shard][1] != bits}


def _is_near(own: list[float], other: list[float]) -> bool:
    """Return whether a rank's sums equal another rank's within rounding.

    Args:
        own, other: the sum of a tensor, and of its absolute values.
    """
    return all(abs(one - there) <= _ROUNDING * other[1] for one, there in zip(own, other, strict=True))


def _without_statistics(found: Mapping[str, list[int]], module: LightningModule) -> list[str]:
    """Return the names that do not belong to a batch norm."""
    norms = {names.own_name(name) for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    return [name for name in found if name.rpartition(".")[0] not in norms]
