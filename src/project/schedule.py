"""Learning rates as functions of the optimizer step: warm-up, then decay to a fraction of the optimizer's rate."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(
    optimizer: Optimizer, total_steps: int, warmup_fraction: float = 0.05, final_fraction: float = 0.1
) -> LambdaLR:
    """Half a cosine from the optimizer's rate to `final_fraction` of it (Loshchilov and Hutter 2016)."""
    return _warmed_up(
        optimizer,
        total_steps,
        warmup_fraction,
        final_fraction,
        lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    )


def linear(
    optimizer: Optimizer, total_steps: int, warmup_fraction: float = 0.05, final_fraction: float = 0.0
) -> LambdaLR:
    return _warmed_up(optimizer, total_steps, warmup_fraction, final_fraction, lambda done: 1 - done)


def _warmed_up(
    optimizer: Optimizer,
    total_steps: int,
    warmup_fraction: float,
    final_fraction: float,
    decay: Callable[[float], float],
) -> LambdaLR:
    """`decay` leads from 1 to 0 as its argument, the part that is done, goes from 0 to 1."""
    if total_steps < 1:
        raise ValueError(
            f"scheduler.total_steps is {total_steps}, and the rate decays towards a known last step; "
            "set trainer.max_steps=1000 (or any positive number), or scheduler=constant"
        )
    if not 0 <= warmup_fraction < 1:
        raise ValueError(f"scheduler.warmup_fraction is {warmup_fraction}; expected 0 or more and less than 1")
    warmup_steps = round(total_steps * warmup_fraction)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return final_fraction + (1 - final_fraction) * decay(done)

    return LambdaLR(optimizer, factor)
