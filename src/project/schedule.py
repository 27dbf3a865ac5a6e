"""Learning-rate schedules as functions of the optimizer step."""

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupDecay:
    """Linear warm-up to the optimizer's learning rate, then decay to a fraction of it.

    Called with an optimizer, it returns the scheduler.

    Args:
        total_steps: number of steps of warm-up and decay; -1 for the steps of the run, which `over` sets.
        decay: shape of the decay.
        warmup_fraction: fraction of the steps in the warm-up, from 0 to 1.
        final_fraction: fraction of the optimizer's learning rate at the end of the decay.
        decay_fraction: fraction of the steps after the warm-up in which the rate decays, at the end; before them it is
            constant (Hu et al. 2024, WSD).
    """

    def __init__(
        self,
        total_steps: int,
        decay: Literal["cosine", "linear"] = "cosine",
        warmup_fraction: float = 0.05,
        final_fraction: float = 0.1,
        decay_fraction: float = 1.0,
    ) -> None:
        if total_steps < 1 and total_steps != -1:
            raise ValueError(
                f"scheduler.total_steps is {total_steps}; expected at least 1, or -1 for the steps of the run"
            )
        if not 0 <= warmup_fraction < 1:
            raise ValueError(f"scheduler.warmup_fraction is {warmup_fraction}; expected at least 0, less than 1")
        if not 0 <= final_fraction < math.inf:
            raise ValueError(f"scheduler.final_fraction is {final_fraction}; expected a number, at least 0")
        if not 0 < decay_fraction <= 1:
            raise ValueError(f"scheduler.decay_fraction is {decay_fraction}; expected more than 0, at most 1")
        if decay not in ("cosine", "linear"):
            raise ValueError(f"scheduler.decay is {decay!r}; use cosine or linear")
        self.total_steps = total_steps
        self.decay = decay
        self.warmup_fraction = warmup_fraction
        self.final_fraction = final_fraction
        self.decay_fraction = decay_fraction

    def over(self, run_steps: float) -> "WarmupDecay":
        """Return the same schedule over `run_steps` steps. Raises ValueError if the run's last step is not known."""
        if not 0 < run_steps < math.inf:
            raise ValueError(
                "the rate decays until the run's last step, which is not known; set trainer.max_steps=1000 (or "
                "another number), scheduler.total_steps=1000, or scheduler=constant"
            )
        options = (self.decay, self.warmup_fraction, self.final_fraction, self.decay_fraction)
        return WarmupDecay(int(run_steps), *options)

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Return the factor of the optimizer's learning rate at a step; the cosine is by Loshchilov and Hutter
        (2016)."""
        warmup_steps = round(self.total_steps * self.warmup_fraction)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        decay_steps = (self.total_steps - warmup_steps) * self.decay_fraction
        done = min(1.0, max(0.0, step - self.total_steps + decay_steps) / max(1, decay_steps))
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final_fraction + (1 - self.final_fraction) * left
