"""A loss that is not finite: when, in which batch, and what then."""

from __future__ import annotations

import logging
import math
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightswitch.batches.callback import GlobalBatch
from lightswitch.errors import NotFinite

log = logging.getLogger(__name__)

_ADVICE = (
    "go on from the last checkpoint with a lower learning rate, with on_nan=skip to leave out the step of such a loss, "
    "or with on_nan=ignore"
)


class FiniteLoss(Callback):
    """Callback that looks whether each loss is finite, before its backward pass.

    On a GPU, which that would make wait, the losses are looked at together: at each logged step, and before a
    checkpoint is saved. No checkpoint is saved whose weights are not finite.

    Args:
        batch: which knows where in training the run is.
        on_nan: stop the run; or skip, which leaves out the optimizer step of a loss that is not finite on any rank, and
            looks at each.

    Raises:
        NotFinite: in any hook, on the rank whose loss it is.
    """

    def __init__(self, batch: GlobalBatch, on_nan: Literal["stop", "skip"]) -> None:
        self._batch = batch
        self._skips = on_nan == "skip"
        self._waiting: list[tuple[str, Tensor]] = []  # where each loss was, and the loss, until it is looked at
        self._is_bad = False  # a loss of this step, on this rank
        self._skipped_steps = 0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._skips:
            self._is_bad |= not math.isfinite(loss.item())
        elif loss.device.type == "cpu":
            if not math.isfinite(value := loss.item()):
                raise self._error(trainer, value, self._batch.describe_position(trainer, most_samples=8))
        else:
            kept = loss.detach().clone()  # the next step of a CUDA graph writes its loss to the same place
            self._waiting.append((f"in step {trainer.global_step}", kept))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._skips:
            return
        bad = torch.tensor(float(self._is_bad), device=trainer.strategy.root_device)
        if trainer.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if pl_module.automatic_optimization:
            self._is_bad = False
        if not bad.item():
            return
        self._tell_skipped(trainer)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:  # leaves such a step out by itself
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # which an optimizer leaves as it is

    def _tell_skipped(self, trainer: Trainer) -> None:
        self._skipped_steps += 1
        if trainer.is_global_zero and self._skipped_steps & (self._skipped_steps - 1) == 0:  # the 1st, 2nd, 4th, 8th…
            count = "" if self._skipped_steps == 1 else f", {self._skipped_steps} such steps so far"
            log.warning("skips      step %d, whose loss is not finite%s", trainer.global_step, count)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if not pl_module.automatic_optimization:  # several optimizers may have stepped by the same loss
            self._is_bad = False
        if self._waiting and trainer._logger_connector.should_update_logs:
            self._look(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        self._look(trainer)
        if name := _not_finite(pl_module):
            where = self._batch.describe_position(trainer, most_samples=8)
            raise NotFinite(f"{name} is not finite, and no checkpoint is saved of it, {where}; {_ADVICE}")

    def _look(self, trainer: Trainer) -> None:
        """Look at the losses that wait, which synchronises with the device."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        values = torch.stack([loss.float() for _, loss in waiting]).tolist()
        for (where, _), value in zip(waiting, values, strict=True):
            if not math.isfinite(value):
                raise self._error(trainer, value, where)

    def _error(self, trainer: Trainer, value: float, where: str) -> NotFinite:
        name = _not_finite(trainer.lightning_module)
        weights = f"{name} is not finite by now" if name else "the weights are finite"
        return NotFinite(f"the loss is {value} {where}; {weights}; {_ADVICE}")


@torch.no_grad()
def _not_finite(module: LightningModule) -> str | None:
    """Return the name of the first parameter that is not finite, as far as this process holds it."""
    held = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    }
    names = [name for name, tensor in held.items() if tensor.numel()]
    if not names:
        return None
    norms = torch._foreach_norm([held[name] for name in names])
    # some may be on the host, where a strategy offloads the others
    finite = torch.stack([norm.float().cpu() for norm in norms]).isfinite().tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)
