"""Time to load a batch of a stream, against the same samples by index, both with the engine's loaders.

python -m benchmarks.streams
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.data import WindowSamples
from benchmarks.results import Row, interleaved, options, publish, row
from lightswitch.batches.loaders import training_loader
from lightswitch.batches.plan import BatchPlan, RankShare
from project.data.loaders import Pair

GLOBAL_BATCH, CONTEXT = 64, 256
STEPS = 60


class InOrder(IterableDataset[Pair]):
    def __init__(self, samples: Dataset[Pair]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Pair]:
        return (self.samples[index] for index in range(len(self.samples)))  # type: ignore[arg-type]  # torch declares no length


def main() -> None:
    given = options("streams", __doc__.splitlines()[0])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.bin")
        count = GLOBAL_BATCH * STEPS * CONTEXT + 1
        np.random.default_rng(0).integers(0, 50_257, count).astype(np.uint16).tofile(file)
        samples = WindowSamples(file, CONTEXT)
        rows = [
            compare("stream", samples, replicas=1, workers=0, quick=given.quick),
            compare("stream, 1 of 4 devices", samples, replicas=4, workers=0, quick=given.quick),
            compare("stream, 2 workers", samples, replicas=1, workers=2, quick=given.quick),
        ]
    publish(rows, given, per="a batch")


def compare(name: str, samples: Dataset[Pair], replicas: int, workers: int, quick: bool) -> Row:
    """Compare an epoch of one device, in CPU time, or in wall time if workers read."""
    plan = BatchPlan(GLOBAL_BATCH, GLOBAL_BATCH // replicas, replicas, 1)
    share, clock = RankShare(plan, 0, 1), time.perf_counter if workers else time.process_time
    by_index = training_loader(DataLoader(samples, GLOBAL_BATCH, num_workers=workers), share)
    stream = training_loader(DataLoader(InOrder(samples), GLOBAL_BATCH, num_workers=workers), share)
    contenders = {name: _epoch(stream, clock), "by index": _epoch(by_index, clock)}
    return row(name, "by index", interleaved(contenders, 1 if quick else 9))


def _epoch(loader: DataLoader[Any], clock: Callable[[], float]) -> Callable[[], float]:
    """Return a function that measures seconds per batch, without the first batch, for which workers start."""

    def seconds() -> float:
        batches = iter(loader)
        next(batches)
        start = clock()
        for _ in batches:
            pass
        return (clock() - start) / (STEPS - 1)

    return seconds


if __name__ == "__main__":
    main()
