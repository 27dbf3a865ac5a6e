"""Learning rates as functions of the optimizer step."""

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupDecay:
    """A straight rise to the optimizer's rate over the first part of the run, then a fall to a fraction of it.

    Called with an optimizer, it gives the scheduler. Raises ValueError for a run without a known last step.
    """

    def __init__(
        self,
        total_steps: int,
        decay: Literal["cosine", "linear"] = "cosine",
        warmup_fraction: float = 0.05,
        final_fraction: float = 0.1,
    ) -> None:
        if total_steps < 1:
            raise ValueError(
                f"scheduler.total_steps is {total_steps}, but the rate falls towards a known last step; "
                "set trainer.max_steps=1000 (or any positive number), or scheduler=constant"
            )
        if not 0 <= warmup_fraction < 1:
            raise ValueError(f"scheduler.warmup_fraction is {warmup_fraction}; expected at least 0, less than 1")
        if decay not in ("cosine", "linear"):
            raise ValueError(f"scheduler.decay is {decay!r}; use cosine or linear")
        self.total_steps = total_steps
        self.decay = decay
        self.warmup_steps = round(total_steps * warmup_fraction)
        self.final_fraction = final_fraction

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """What the optimizer's rate is multiplied by; the cosine is Loshchilov and Hutter's (2016)."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final_fraction + (1 - self.final_fraction) * left
