"""DistributedDataParallel without its reducer, which is C++ that reads the values of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel


class FakeDDP(DistributedDataParallel):
    """Stand-in for DistributedDataParallel that takes the same memory and sends the same bytes.

    Each 25 MiB of gradients have a bucket, which is averaged once it is full.

    Args:
        module: whose gradients are averaged.
        bucket_bytes: of a bucket; the first is of 1 MiB at most.
        gradient_as_bucket_view: gradients lie in the buckets, and not beside them.
        sent_dtype: that a communication hook casts to; None for the gradients' own.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: float = 25 * 2**20,
        gradient_as_bucket_view: bool = False,
        sent_dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not DistributedDataParallel's, which makes the reducer
        self.module = module
        self.require_backward_grad_sync = True
        self.static_graph = False
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.sent_dtype = sent_dtype
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        limits = [min(2**20, int(bucket_bytes)), int(bucket_bytes)]
        cut, _ = _compute_bucket_assignment_by_size(list[Tensor](trained), limits) if trained else ([], [])
        for indices in cut:
            parameters = [trained[index] for index in indices]
            bucket = _Bucket(self, parameters)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(bucket.take)  # type: ignore[no-untyped-call]  # torch's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer.flatten().view(torch.uint8), src=0)
        return self.module(*args, **kwargs)


class _Bucket:
    """Gradients of one dtype, in the order in which the backward pass makes them."""

    def __init__(self, owner: FakeDDP, parameters: Sequence[nn.Parameter]) -> None:
        self._owner = owner
        sizes = [parameter.numel() for parameter in parameters]
        self._memory = parameters[0].new_empty(sum(sizes))
        views = torch.split(self._memory, sizes)
        self._views = {p: view.view(p.shape) for p, view in zip(parameters, views, strict=True)}
        self._missing = len(parameters)

    def take(self, parameter: Tensor) -> None:
        """Hook a parameter's gradient: once all are there, average them."""
        if not self._owner.require_backward_grad_sync:
            return
        if self._owner.gradient_as_bucket_view:
            parameter.grad = self._views[parameter].detach()  # type: ignore[index]  # the hook is a parameter's
        self._missing -= 1
        if self._missing == 0:
            self._missing = len(self._views)
            sent = self._owner.sent_dtype
            dist.all_reduce(self._memory if sent is None else self._memory.to(sent))
