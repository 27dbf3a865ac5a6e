"""One rule by which ranks agree: they begin with rank 0's values; what differs later is refused by its name."""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import local
from lightswitch.errors import Refused, listed
from lightswitch.strategies.weights import FIRST_STEP_ALONE

log = logging.getLogger(__name__)

_FIRST_BATCHES = 3
_ROUNDING = 1e-6  # relative tolerance: different machines may round differently
_BLOCK = 1 << 20  # elements summed at once: a large tensor in 64 bits may not fit in memory beside the tensor


class Agreement(Callback):
    """Callback that compares what ranks hold copies of, after the first three batches, at each epoch and at each save.

    A parameter that differs ends the run, because a checkpoint holds rank 0's copy. Buffers may differ: batch norms
    take statistics of their rank's samples, and DDP broadcasts rank 0's before each forward pass. Other buffers that
    differ are logged once.

    Attributes:
        ends_runs: whether a parameter that differs ends the run.
    """

    def __init__(self) -> None:
        self.ends_runs = True
        self._batches = 0  # since the start of training
        self._told_of_buffers = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batches > _FIRST_BATCHES:
            self._compare(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if 0 < self._batches <= _FIRST_BATCHES:
            self._compare(trainer, pl_module)
        self._batches += 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._compare(trainer, pl_module)

    def _compare(self, trainer: Trainer, module: LightningModule) -> None:
        """Compare replicas. Collective.

        Raises:
            Refused: parameters differ; raised on every rank.
        """
        strategy = trainer.strategy
        if trainer.world_size == 1 or not isinstance(strategy, PortableCheckpoints):
            return
        parameters = {name: held for name, held in strategy.local_parameters().items() if isinstance(held, Tensor)}
        buffers = {names.own_name(name): buffer for name, buffer in module.named_buffers()}
        unequal = differing({**parameters, **buffers}, strategy.root_device)
        if self.ends_runs and (found := [name for name in unequal if name in parameters]):
            ranks = sorted({rank for name in found for rank in unequal[name]})
            raise Refused(
                f"{listed(found)} of rank {listed([str(rank) for rank in ranks])} differs from rank 0 after step "
                f"{trainer.global_step}: each rank changes it independently, as in a hook that draws random numbers or "
                "reads the rank's samples; compute it on rank 0 and broadcast it, or from the samples of all ranks "
                f"(self.all_gather). {self._cause(module)}; type mode=check to see where"
            )
        if not self._told_of_buffers and (found := _without_statistics(unequal, module)) and trainer.is_global_zero:
            self._told_of_buffers = True
            log.warning(
                "buffers    %s differs between ranks; evaluation and checkpoints use rank 0's. To compute it as one "
                "process does, gather its inputs over ranks first (self.all_gather)", listed(found),
            )  # fmt: skip

    @staticmethod
    def _cause(module: LightningModule) -> str:
        if module.automatic_optimization:
            return f"If the first batch alone sets it, {FIRST_STEP_ALONE}"
        return "Call self.manual_backward(loss) in place of loss.backward(), whose gradients are of the rank's samples"


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
    most = min(_BLOCK, max(2 * local(tensor).numel() for tensor in held.values()))  # complex ones take two
    drawn = torch.rand(most, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = {there: drawn.to(there) for there in {local(tensor).device for tensor in held.values()}}
    evidence = [_evidence(tensor, weights[local(tensor).device]).to(device) for tensor in held.values()]
    own = torch.stack(evidence)  # (tensors, 5)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    of_tensors = torch.stack(gathered, dim=1).tolist()
    return {name: ranks for name, found in zip(held, of_tensors, strict=True) if (ranks := _others(found))}


def _is_copied(tensor: DTensor) -> bool:
    return any(placement.is_replicate() for placement in tensor.placements)


@torch.no_grad()
def _evidence(tensor: Tensor, weights: Tensor) -> Tensor:
    """Return numbers that are equal on ranks with equal copies: which shard it is, how many of its elements are not
    finite, and three sums of the others: of their absolute values, of them, and of them by random weights.

    A plain sum is equal for many tensors that differ, such as for other orders of the elements.
    """
    flat = local(tensor.detach()).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    total = torch.zeros(4, dtype=torch.float64, device=flat.device)
    for index, block in enumerate(torch.split(flat, _BLOCK)):
        wide = block.double()
        finite = wide.where(wide.isfinite(), 0)
        weighted = (finite * weights[: len(block)]).sum() / (index + 1)  # blocks that change places differ
        total += torch.stack([(~wide.isfinite()).sum(), finite.abs().sum(), finite.sum(), weighted])
    return torch.cat([total.new_tensor([_shard(tensor)]), total])


def _shard(tensor: Tensor) -> int:
    """Return a number that is equal on ranks with the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    boxes = [(tuple(box.offsets), tuple(box.sizes)) for box in tensor.__create_chunk_list__()]  # type: ignore[no-untyped-call]  # untyped in torch
    return zlib.crc32(repr(boxes).encode())


def _others(ranks: list[list[float]]) -> list[int]:
    """Return the ranks whose evidence differs from that of the first rank with the same shard."""
    first: dict[float, list[float]] = {}
    return [
        rank
        for rank, (shard, *evidence) in enumerate(ranks)
        if not _is_near(evidence, first.setdefault(shard, evidence))
    ]


def _is_near(own: list[float], other: list[float]) -> bool:
    """Return whether a rank's evidence equals another rank's within rounding."""
    (infinite, *sums), (its_infinite, size, *_) = own, other
    return infinite == its_infinite and all(
        abs(one - its) <= _ROUNDING * size for one, its in zip(sums, other[1:], strict=True)
    )


def _without_statistics(found: Mapping[str, list[int]], module: LightningModule) -> list[str]:
    """Return the names that do not belong to a batch norm."""
    norms = {names.own_name(name) for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    return [name for name in found if name.rpartition(".")[0] not in norms]


# Initial values


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


def leave_meta(module: nn.Module) -> None:
    """Move what is on the meta device to the host, without values: memory is allocated when it is first written."""
    for parameter in module.parameters():
        if parameter.is_meta:
            made = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            vars(made).update(vars(parameter))  # attributes that models set on their parameters
            torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]  # untyped in torch
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(part, name, _on_host(buffer))
        if isinstance(part, Metric):
            part._apply(_on_host)


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
