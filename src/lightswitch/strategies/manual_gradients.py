"""Gradients under manual optimization that do not come from `self.manual_backward`: averaged, weighted, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightswitch import patches

Weight = float | Tensor


class ManualGradients:
    """Record of the gradients that are averaged over the ranks, under manual optimization in ddp.

    A backward pass that the module starts itself (`loss.backward()`) counts like `self.manual_backward`: its loss is
    weighted by the rank's share of the batch, and DDP averages its gradients. Gradients that are set otherwise, by
    `torch.autograd.grad` or a formula, or accumulated under `no_sync`, are averaged when an optimizer steps. An average
    is linear: one of gradients that were averaged before, to which a rank has added others, is right, too.
    """

    def __init__(
        self,
        prepare: Callable[[Any], None],
        finish: Callable[[Any], None],
        weight: Callable[[], Weight],
        optimized: Callable[[], set[Tensor]],
    ) -> None:
        self._prepare, self._finish, self._weight, self._optimized = prepare, finish, weight, optimized
        self._known: Any = WeakIdKeyDictionary()  # by gradient: its version, and whether it is averaged
        self._is_in_step = False
        self._is_expected = False  # the next backward pass is Lightning's

    def expect_pass(self) -> None:
        """Record that Lightning has prepared the next backward pass."""
        self._is_expected = True

    @contextmanager
    def in_step(self, model: DistributedDataParallel) -> Iterator[None]:
        """Context of a training step."""

        def run_pass(
            run: Callable[..., Any], accumulates: bool, outputs: Sequence[Any], *args: Any, **kwargs: Any
        ) -> Any:
            if not accumulates:
                return run(outputs, *args, **kwargs)
            before = {one: (one.grad, one.grad._version) for one in model.parameters() if one.grad is not None}
            is_own, self._is_expected = not self._is_expected, False
            if not is_own:
                result = run(outputs, *args, **kwargs)
            elif len(args) > 3 and args[3]:  # `inputs`: DDP would wait for the gradients of all others
                return run(outputs, *args, **kwargs)
            else:
                self._prepare(outputs)
                self._is_expected = False
                with weighted(outputs, self._weight()):
                    result = run(outputs, *args, **kwargs)
                self._finish(outputs)
            for one in model.parameters():
                grad, (was, version) = one.grad, before.get(one, (None, 0))
                if grad is not None and not (grad is was and grad._version == version):
                    self._known[grad] = grad._version, model.require_backward_grad_sync
            return result

        self._is_expected = False
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self.average(optimizer))
        try:
            with around_passes(run_pass):
                yield
        finally:
            hook.remove()

    @torch.no_grad()
    def average(self, optimizer: Optimizer) -> None:
        """Average the gradients that an optimizer is about to read, unless they are averaged. Collective if not.

        All ranks are expected to have gradients for the same parameters.
        """
        own = {one for group in optimizer.param_groups for one in group["params"]} & self._optimized()
        if self._is_in_step or not own:
            return
        others: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
        for one in (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None):
            version, is_averaged = self._known.get(one.grad, (None, False))
            is_weighted = version == one.grad._version  # by a backward pass
            if not (is_weighted and is_averaged):
                others.setdefault((one.dtype, one.device, is_weighted), []).append(one)
        for (*_, is_weighted), parameters in others.items():
            whole = torch.cat([_dense(one).flatten() for one in parameters])
            whole *= (1.0 if is_weighted else self._weight()) / dist.get_world_size()
            dist.all_reduce(whole)
            parts = torch.split(whole, [one.numel() for one in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view(parameter.shape)
                self._known[parameter.grad] = parameter.grad._version, True

    @contextmanager
    def in_optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of a step by Lightning's wrapper, in which gradients may be unscaled once they are averaged."""
        self.average(optimizer)
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False


@contextmanager
def around_passes(run_pass: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``run_pass(run, accumulates, outputs, …)`` replaces torch's `run` in each backward pass.

    ``accumulates`` says whether the pass adds to gradients: `grad` does not, nor does the inner pass of a checkpoint.
    """
    run: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]  # called by `backward` and `grad`

    def replaced(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_inner = torch._C._current_graph_task_id() != -1
        return run_pass(run, bool(kwargs.get("accumulate_grad")) and not is_inner, outputs, *args, **kwargs)

    patches.replace(torch.autograd, "_engine_run_backward", replaced)
    try:
        yield
    finally:
        patches.replace(torch.autograd, "_engine_run_backward", run)


def own_weight(strategy: Strategy) -> Weight:
    """Return the weight of this rank's loss in the mean over a step."""
    weight: Callable[[], Weight] | None = getattr(strategy, "loss_weight", None)  # of HookedStrategy
    return 1.0 if weight is None else weight()


@contextmanager
def weighted(outputs: Sequence[Any], weight: Weight) -> Iterator[None]:
    """Context of a backward pass from losses that are weighted by this rank's share of the batch."""
    is_even = not isinstance(weight, Tensor) and weight == 1.0
    losses = [] if is_even else [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
    hooks = [one.register_hook(lambda gradient: gradient * weight) for one in losses]  # type: ignore[no-untyped-call]  # untyped
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _dense(parameter: nn.Parameter | Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
