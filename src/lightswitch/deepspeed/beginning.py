"""The beginning of a live DeepSpeed engine, to which it returns once some steps were tried: weights and optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.checkpoints import optimizers


@contextmanager
def restored(engine: Any) -> Iterator[None]:
    """Context that leaves what DeepSpeed keeps of the weights, its loss scale and its count of steps as they were.

    Each rank copies what it holds to its memory. The weights that the module holds whole, at stages 1 and 2, are left
    to the caller, and so is the optimizer.
    """
    zero = engine.optimizer
    kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in _kept(engine)]
    scaler, steps = copy.copy(zero.loss_scaler), engine.global_steps
    yield  # after an error the run ends, and the ranks no longer gather together
    for tensor, before in kept:
        tensor.copy_(before)
    if whole := getattr(zero, "persistent_parameters", ()):  # small ones, which stage 3 gathers once in a step
        whole[0].partition(whole)
        whole[0].all_gather(whole)
    patches.replace(zero, "loss_scaler", scaler)
    patches.replace(engine, "global_steps", steps)


def _kept(engine: Any) -> Iterator[Tensor]:
    """Yield this rank's parts of the weights: the optimizer's, and at stage 3 those that are gathered."""
    zero = engine.optimizer
    is_stage_3 = engine.zero_optimization_stage() == 3
    flats = zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
    yield from (flat.detach() for flat in flats)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor") and parameter.requires_grad:
            yield parameter.ds_tensor.detach()


def replace_optimizer(engine: Any, made: Optimizer) -> None:
    """Let an engine step by another optimizer, which was made over the module's parameters as the one before it was.

    It steps over DeepSpeed's flat groups in place of parameters, as computed as before.
    """
    zero = engine.optimizer
    for group, before in zip(made.param_groups, zero.optimizer.param_groups, strict=True):
        group.update({key: value for key, value in before.items() if key not in optimizers.options_of(before)})
    patches.replace(zero, "optimizer", made)
    if engine.zero_optimization_stage() < 3:  # parameters were linked to the states of the other
        patches.replace(zero, "_hp_optimizer_states_linked", False)
