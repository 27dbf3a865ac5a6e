"""Backward passes that a module starts itself (`loss.backward()`), under sharded strategies: weighted, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightswitch import patches

Weight = float | Tensor


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
    hooks = [one.register_hook(lambda gradient: gradient * weight) for one in losses]  # type: ignore[no-untyped-call]  # the library has no types for it
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
