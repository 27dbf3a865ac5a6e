"""Cross-entropy of a linear head in chunks, so that the logits of a large vocabulary are never in memory at once."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 2**29  # of logits in 32 bits
COLUMNS = 64  # a product on a GPU is slow if the number of columns is odd, such as GPT-2's 50,257


class LinearCrossEntropy(nn.modules.loss._Loss):
    """The mean of `F.cross_entropy(F.linear(x, weight), targets)` over the targets that are not ignored.

    GPT-2's logits of 16 windows take 3.3 GB in 32 bits, and autograd reads and writes them ten times. Here they are
    computed in chunks, each together with its gradients, which follow from the logits by a subtraction (Hsu et al.
    2024, Liger Kernel, arXiv:2410.10989, §3.2). Logits that fit into one chunk are left to autograd, unless there is a
    group.

    Attributes:
        group: process group whose ranks hold consecutive rows of the weight; None if the weight is not sharded.
    """

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for `x` (…, width), `weight` (classes, width) and `targets` (…), which are class indices."""
        if self.group is None and 4 * targets.numel() * len(weight) <= CHUNK_BYTES:
            logits = _logits(x.flatten(0, -2), _padded(weight))[:, : len(weight)]
            return F.cross_entropy(logits, targets.flatten(), ignore_index=self.ignore_index)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.to(dtype).flatten(0, -2)
        options = (self.ignore_index, self.group, torch.is_grad_enabled())
        loss: Tensor = _Chunked.apply(rows, weight.to(dtype), targets.flatten(), *options)  # type: ignore[no-untyped-call]
        return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignored: int,
        group: dist.ProcessGroup | None,
        needs_grads: bool,
    ) -> Tensor:
        classes, padded = len(weight), _padded(weight)
        is_counted = targets != ignored
        first = 0 if group is None else dist.get_rank(group) * classes
        is_here = is_counted & (targets >= first) & (targets < first + classes)
        places = (targets - first).masked_fill(~is_here, 0)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        grad_weight = torch.zeros_like(padded, dtype=total.dtype) if needs_grads else None
        grads: list[Tensor] = []
        for rows, at, here, counts in _chunks(classes, x, *(each[:, None] for each in (places, is_here, is_counted))):
            logits = _logits(rows, padded)
            logits[:, classes:] = -math.inf  # a slice without these columns would be copied, and take a chunk more
            logs = _log_softmax(logits, group)
            total -= logs.gather(1, at).masked_fill(~here, 0).sum()
            if grad_weight is not None:  # with respect to logits: the probabilities, minus 1 at the target
                grad = logs.exp_()
                grad = grad.scatter_(1, at, grad.gather(1, at) - here.to(grad.dtype)).to(x.dtype)
                grads.append((grad @ padded).mul_(counts))
                grad_weight += grad.t() @ (rows * counts)
        if group is not None:
            dist.all_reduce(total, group=group)
        count = is_counted.sum()
        if grad_weight is not None:
            grad_x = torch.cat(grads) if len(grads) > 1 else grads[0]
            if group is not None:
                dist.all_reduce(grad_x, group=group)
            ctx.save_for_backward(grad_x, grad_weight[:classes].to(weight.dtype), count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled here and not in forward, where 16 bits would lose small gradients before a loss scaler enlarges them.
        grad_x, grad_weight, count = ctx.saved_tensors
        scale = grad / count
        return (grad_x * scale).to(grad_x.dtype), (grad_weight * scale).to(grad_weight.dtype), None, None, None, None


def _padded(weight: Tensor) -> Tensor:
    padding = -len(weight) % COLUMNS
    return F.pad(weight, (0, 0, 0, padding)) if padding else weight


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits in at least 32 bits: a loss in 16 bits has two digits."""
    logits = F.linear(x, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _chunks(classes: int, *batch: Tensor) -> zip[tuple[Tensor, ...]]:
    """Split a batch into chunks whose logits take at most CHUNK_BYTES, or have 128 rows."""
    most_rows = max(128, CHUNK_BYTES // (4 * classes) // 128 * 128)
    count = math.ceil(len(batch[0]) / most_rows)
    return zip(*(each.chunk(count) for each in batch), strict=True)


def _log_softmax(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the log-softmax over the columns of all ranks of a group, which sends two numbers per row (Shoeybi et al.
    2019, Megatron-LM, §3)."""
    if group is None:
        return logits.log_softmax(-1)
    largest = logits.amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits = logits - largest
    sums = logits.exp().sum(-1, keepdim=True)
    dist.all_reduce(sums, group=group)
    return logits.sub_(sums.log_())
