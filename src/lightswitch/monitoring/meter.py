"""Speed of training: optimizer steps a second, pauses left out."""

from __future__ import annotations

from collections import deque
from time import perf_counter


class Meter:
    """Meter of optimizer steps a second, which is told of each step and each pause.

    The first steps warm caches, allocators and data workers up, and do not count.

    Args:
        window: readings over which the speed is taken.

    Attributes:
        steps_per_second: at the last reading; None until there are steps to measure.
    """

    WARMUP_STEPS = 3

    def __init__(self, window: int = 1) -> None:
        self._readings: deque[tuple[int, float]] = deque(maxlen=window)  # (step, seconds in training)
        self.start(0)

    def start(self, step: int) -> None:
        """Begin anew at a step, with a warm-up."""
        self.steps_per_second: float | None = None
        self._readings.clear()
        self._warm_step = step + self.WARMUP_STEPS
        self._start_seconds = perf_counter()
        self._paused_seconds = 0.0
        self._pause_start: float | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether steps are still to be noted: the reading that all others are against is taken when this ends."""
        return not self._readings

    def update(self, step: int) -> None:
        """Note a step; call it after each, while the meter is warming up."""
        if self.is_warming_up and step >= self._warm_step:
            self._readings.append((step, self._training_seconds()))

    def read(self, step: int) -> float | None:
        """Take a reading, and return the steps a second since `window` readings ago; None until there are any."""
        if self._readings and step > self._readings[-1][0]:
            first_step, first_seconds = self._readings[0]
            seconds = self._training_seconds()
            self._readings.append((step, seconds))
            self.steps_per_second = (step - first_step) / (seconds - first_seconds)
        return self.steps_per_second

    def pause(self) -> None:
        """Stop the clock, as for a validation; a second time it does nothing."""
        if self._pause_start is None:
            self._pause_start = perf_counter()

    def resume(self) -> None:
        """Start the clock again after a pause."""
        if self._pause_start is not None:
            self._paused_seconds += perf_counter() - self._pause_start
            self._pause_start = None

    def seconds_for(self, steps: float) -> float | None:
        """Return the expected wall time of so many more steps, with pauses in the proportion seen so far."""
        if self.steps_per_second is None:
            return None
        training_seconds = self._training_seconds()
        return steps / self.steps_per_second * (1 + self._paused_seconds / training_seconds)

    def _training_seconds(self) -> float:
        now = perf_counter() if self._pause_start is None else self._pause_start
        return now - self._start_seconds - self._paused_seconds
