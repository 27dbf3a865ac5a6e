"""Compute similarities and differences between runs: curves, speed and configs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from lightswitch.compare.run import Run
from lightswitch.errors import Refused

_NO_CURVES = ("throughput/", "memory/", "lr-")  # performance metrics and learning rates
_NO_CHOICES = ("run_id", "compare", "trainer.default_root_dir")  # keys that only identify the run
_STEP_SECONDS, _SAMPLES, _TOKENS = (
    f"throughput/{quantity}" for quantity in ("step_seconds", "samples_per_second", "tokens_per_second")
)


@dataclass(frozen=True)
class Difference:
    """The largest difference between the curves of one metric.

    Args:
        steps: number of steps at which at least two runs have logged it.
        largest: difference between the highest and the lowest value at one step; infinite if some, but not all, values
            are not finite.
        step: step with the largest difference; None if there is no common step.
        low: label of the run with the lowest value at that step.
        high: label of the run with the highest value at that step, or with one that is not finite.
    """

    metric: str
    steps: int
    largest: float
    step: int | None
    low: str
    high: str


@dataclass(frozen=True)
class Speed:
    """Speed of a run, as medians of its logged values, so that pauses and profiled steps do not count.

    Args:
        efficiency: samples per second and device, relative to the fastest run on one device; None without such a run.
    """

    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    efficiency: float | None


@dataclass(frozen=True)
class Comparison:
    """Runs with the same name, in the given order.

    Raises:
        Refused: there are fewer than two runs, or they have different names.
    """

    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            given = ", ".join(str(run.path) for run in self.runs)
            raise Refused(f"found one run, {given}, expected two or more; give another run directory")
        named = {run.name: run for run in self.runs if run.name is not None}
        if len(named) > 1:
            message = ", ".join(f"{run.path} of {name}" for name, run in named.items())
            raise Refused(f"found runs with different names: {message}; compare runs with the same name")

    @property
    def name(self) -> str:
        """The common name of the runs."""
        return next((run.name for run in self.runs if run.name is not None), "no name")

    @property
    def objectives(self) -> list[str]:
        """Distinct objectives of the runs, usually one."""
        return list(dict.fromkeys(run.objective for run in self.runs if run.objective is not None))

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that at least two runs have logged, with train/loss and the objectives first."""
        counts: dict[str, int] = {}
        for name in (name for run in self.runs for name in run.curves if not name.startswith(_NO_CURVES)):
            counts[name] = counts.get(name, 0) + 1
        first = ("train/loss", *self.objectives)
        ordered = [*(name for name in first if name in counts), *(name for name in counts if name not in first)]
        return [name for name in dict.fromkeys(ordered) if counts[name] > 1]

    def with_metric(self, metric: str) -> list[Run]:
        """Return the runs that have logged the metric."""
        return [run for run in self.runs if run.curves.get(metric)]


def differences(comparison: Comparison) -> list[Difference]:
    """Return the largest difference of each metric."""
    return [difference(metric, comparison.with_metric(metric)) for metric in comparison.metrics]


def difference(metric: str, runs: Sequence[Run]) -> Difference:
    """Return the largest difference in one metric, over the steps that at least two runs have logged.

    Args:
        runs: runs that have logged the metric.
    """
    curves = [run.curves[metric] for run in runs]
    counts = Counter(step for curve in curves for step in curve)
    common = sorted(step for step, count in counts.items() if count > 1)
    if not common:
        return Difference(metric, 0, 0.0, None, "", "")
    ranges = {step: _range([curve.get(step) for curve in curves]) for step in common}
    at = max(common, key=lambda step: ranges[step][0])  # the first if several are equal
    largest, low, high = ranges[at]
    return Difference(metric, len(common), largest, at, runs[low].label, runs[high].label)


def _range(values: list[float | None]) -> tuple[float, int, int]:
    """Return the largest difference between values, and the indices of the lowest and the highest value."""
    given = {index: value for index, value in enumerate(values) if value is not None}
    sound = [index for index, value in given.items() if math.isfinite(value)]
    if lost := [index for index in given if index not in sound]:
        return (math.inf, sound[0], lost[0]) if sound else (0.0, 0, 0)
    low, high = (extreme(sound, key=lambda index: given[index]) for extreme in (min, max))
    return given[high] - given[low], low, high


def speeds(comparison: Comparison) -> list[Speed]:
    """Return the speed of each run."""
    samples = [_median(run, _SAMPLES) for run in comparison.runs]
    base = max(
        (speed for run, speed in zip(comparison.runs, samples, strict=True) if speed and run.world_size == 1),
        default=None,
    )
    return [
        Speed(_median(run, _STEP_SECONDS), speed, _median(run, _TOKENS), _efficiency(speed, run.world_size, base))
        for run, speed in zip(comparison.runs, samples, strict=True)
    ]


def _median(run: Run, metric: str) -> float | None:
    values = list(run.curves.get(metric, {}).values())
    return median(values) if values else None


def _efficiency(samples_per_second: float | None, devices: int | None, base: float | None) -> float | None:
    if samples_per_second is None or devices is None or base is None:
        return None
    return samples_per_second / (devices * base)


def choices(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the config keys whose values differ, with the value in each run, or `-` if a run lacks the key.

    Runs without a config, which were refused early, are left out.
    """
    configs = [run.config for run in comparison.runs if run.config]
    for key in sorted({key for config in configs for key in config}):
        values = [config.get(key, "-") for config in configs]
        if key not in _NO_CHOICES and len(set(values)) > 1:
            yield key, values
