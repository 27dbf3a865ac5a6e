"""Data parallelism without DistributedDataParallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightswitch.checkpoints.portable import PortableCheckpoints


class AllReduce(PortableCheckpoints, DDPStrategy):
    """Averages all gradients of a step over the ranks at once, as one flat tensor.

    Args:
        timeout_seconds: how long a rank waits for another in a collective.
    """

    def __init__(self, timeout_seconds: float = 1800) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_seconds))
        self._averages = True

    def configure_ddp(self) -> None:
        """Leave the model unwrapped, with rank 0's parameters and buffers on every rank."""
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._averages = False  # in the micro batches before the last one of a step
        yield
        self._averages = True

    def post_backward(self, closure_loss: Tensor) -> None:
        if not self._averages:
            return
        gradients = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
        mean = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.world_size)
        dist.all_reduce(mean)
        for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
