"""Stochastic weight averaging as docs/your-own-code.md shows it."""

from functools import partial

from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


class SWA(WeightAveraging):
    """Mean of the weights after each so many steps, past the first ones (Izmailov et al. 2018, arXiv:1803.05407)."""

    def __init__(self, start_step: int, every_n_steps: int) -> None:
        super().__init__(avg_fn=partial(mean_from, start_step // every_n_steps))
        self.every_n_steps = every_n_steps

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and (step_idx + 1) % self.every_n_steps == 0


def mean_from(start: int, mean: Tensor, weights: Tensor, updates: Tensor | int) -> Tensor:
    return mean + (weights - mean) / max(1, int(updates) - start + 1)
