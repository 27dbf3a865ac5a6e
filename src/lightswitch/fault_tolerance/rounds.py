"""Rounds in which ranks learn the largest of their numbers, at a small part of a step's time."""

from __future__ import annotations

import math
from time import perf_counter

import torch
import torch.distributed as dist

_ROUND_SECONDS = 0.25
_MOST_STEPS = 16  # of a round: the next steps may be longer


class Rounds:
    """Rounds of a training run, each of which ends before the same step on every rank.

    A round begins while the optimizer steps, and its result is read before the next step, so that ranks hardly wait for
    one another: over many nodes, an exchange takes long. Where steps are short, a round is a quarter of a second of
    them, or 16, by the time that the slowest rank took for the last ones.

    Args:
        ranks: None for a process that is alone.
    """

    def __init__(self, ranks: dist.ProcessGroup | None) -> None:
        self._ranks = ranks
        self._steps = self._steps_left = 1
        self._ended_seconds = -math.inf  # how long a step takes is not known yet: the next round is one step
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None

    def end_before_step(self) -> bool:
        """Count a step that is to start, and return whether the round is to end before it."""
        self._steps_left -= 1
        return self._steps_left <= 0

    def begin(self, number: float) -> None:
        """Give this rank's number, if the round ends before the next step. Collective; waits for no rank."""
        if self._ranks is None or self._exchange is not None or self._steps_left > 1:
            return
        seconds_a_step = (perf_counter() - self._ended_seconds) / self._steps
        given = torch.tensor([number, seconds_a_step], dtype=torch.float64)
        work = dist.all_reduce(given, dist.ReduceOp.MAX, self._ranks, async_op=True)
        self._exchange = given, work

    def end(self, number: float) -> float:
        """Return the largest of the ranks' numbers, of this rank's the one that it gave when the round began."""
        self.begin(number)
        if self._exchange is None:
            return number
        (largest, work), self._exchange = self._exchange, None
        work.wait()
        number, seconds_a_step = largest.tolist()
        self._steps = self._steps_left = max(1, min(_MOST_STEPS, int(_ROUND_SECONDS / seconds_a_step)))
        self._ended_seconds = perf_counter()
        return number
