"""How the costs of a run grow with its work: CPU time or bytes at two sizes, and the slope between them.

A slope of 0 is flat, of 1 linear: it is the exponent of the size by which the cost grows.

python -m benchmarks.growth
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.data import RandomSampler

from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan, RankShare
from lightswitch.checkpoints import directory
from lightswitch.checkpoints.reading import Reader
from lightswitch.failures.classify import Rank
from lightswitch.failures.watchdog import Judge, Timeouts
from lightswitch.monitoring.display import aligned, compact
from lightswitch.monitoring.metrics import Table
from lightswitch.process import Process
from lightswitch.runs import claim, resume

BYTES_OF_CHECKPOINT = 2**26
HEAD = ["what", "of", "at", "costs", "at", "costs", "slope", "asked"]


@dataclass(frozen=True)
class Growth:
    """A cost at two sizes of what it may depend on, in seconds or bytes, and the largest slope that is asked."""

    name: str
    of: str
    unit: str
    sizes: tuple[int, int]
    costs: tuple[float, float]
    most: float

    @property
    def slope(self) -> float:
        (small, large), (before, after) = self.sizes, self.costs
        return math.log(max(after, 1e-9) / max(before, 1e-9)) / math.log(large / small)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="at smaller sizes: to see that it runs")
    print("\n".join(aligned([HEAD, *map(cells, growths(parser.parse_args().quick))], [0, 1])))


def growths(is_quick: bool = False) -> list[Growth]:
    return [Growth(*row) for row in rows(is_quick)]


def cells(found: Growth) -> list[str]:
    (small, large), costs = found.sizes, [_cost(cost, found.unit) for cost in found.costs]
    return [
        *(found.name, found.of, compact(small), costs[0], compact(large), costs[1]),
        *(f"{found.slope:.2f}", f"≤ {found.most:g}"),
    ]


def _cost(cost: float, unit: str) -> str:
    if unit == "bytes":
        return f"{compact(cost)}B"
    return f"{cost * 1000:.3g} ms" if cost < 1 else f"{cost:.3g} s"


def rows(is_quick: bool) -> Iterator[tuple[str, str, str, tuple[int, int], tuple[float, float], float]]:
    """Yield each measured cost; briefly, at smaller sizes."""

    def both(sizes: tuple[int, int], measure: Callable[[int], float]) -> tuple[tuple[int, int], tuple[float, float]]:
        small, large = sizes if not is_quick else (sizes[0], 4 * sizes[0])
        return (small, large), (measure(small), measure(large))

    yield "start in a directory", "runs beside it", "seconds", *both((10, 10_000), start_beside), 0.3
    yield "log a row", "rows of metrics.csv", "seconds", *both((1_000, 1_000_000), log_row), 0.3
    yield "open metrics.csv", "rows", "seconds", *both((1_000, 1_000_000), open_table), 1.1
    yield "memory of the order", "samples", "bytes", *both((10**8, 10**9), order_bytes), 0.3
    yield "samples of a step", "samples", "seconds", *both((10**8, 10**9), step_samples), 0.3
    yield "what rank 0 reads of all ranks", "ranks", "seconds", *both((8, 1_024), judge), 1.1
    yield "save a checkpoint of 64 MiB", "tensors", "seconds", *both((100, 10_000), save), 1.1
    yield "read a checkpoint of 64 MiB", "tensors", "seconds", *both((100, 10_000), load), 1.1


def start_beside(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            Path(folder, f"run_{number}", "checkpoints").mkdir(parents=True)
        process, own = Process(), Path(folder, "own")
        own.mkdir()

        def start() -> None:
            claim.take_folder(own, process)
            resume.starts(own)
            process.locks.close()

        return _seconds(start)


def _table(folder: str, count: int) -> Path:
    path = Path(folder, "metrics.csv")
    lines = (f"{step},{64 * step},0,{1 / (1 + step):.17f},0.001" for step in range(count))
    path.write_text("step,samples,epoch,train/loss,lr\n" + "".join(f"{line}\n" for line in lines))
    return path


def log_row(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        table, steps = Table(_table(folder, count)), iter(range(count, 2 * count))
        return _seconds(lambda: table.put(next(steps), {"train/loss": "0.5"}))


def open_table(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = _table(folder, count)
        return _seconds(lambda: Table(path), times=1)


def _slices(samples: int) -> TrainingSlices:
    share = RankShare(BatchPlan.derive(512, None, replicas=8), rank=3, seed=0)
    return TrainingSlices(share, RandomSampler(range(samples)), samples, False)


def order_bytes(samples: int) -> float:
    """Return what Python and NumPy hold once a step is drawn; torch's permutation in addition."""
    tracemalloc.start()
    try:
        slices = _slices(samples)
        slices.samples_of(0, 0)
        assert slices._last is not None
        return tracemalloc.get_traced_memory()[0] + getattr(slices._last[1], "nbytes", 0)
    finally:
        tracemalloc.stop()


def step_samples(samples: int) -> float:
    slices = _slices(samples)
    slices.samples_of(0, 0)
    steps = iter(range(1, samples))
    return _seconds(lambda: slices.samples_of(next(steps), 0))


def judge(count: int) -> float:
    """Return what one look costs rank 0, which it takes four times a second, whatever the length of a step."""
    served = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    store = PrefixStore("watchdog", served)
    report = json.dumps({"beats": 1, "progress": 0, "gone": {}})
    for rank in range(count):
        store.set(str(rank), report)
    of = Judge([Rank(rank, count, f"node{rank // 8}", 1) for rank in range(count)], Timeouts(60, 1500), store)
    now = iter(range(1_000))
    return _seconds(lambda: of.judge(next(now) / 1_000))


def _tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"model.{number}": torch.ones(BYTES_OF_CHECKPOINT // 4 // count) for number in range(count)}


def save(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        tensors = _tensors(count)
        return _seconds(lambda: directory.write(Path(folder, "step_1.ckpt"), tensors, {}, None), times=3)


def load(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path, tensors = Path(folder, "step_1.ckpt"), _tensors(count)
        directory.write(path, tensors, {}, None)
        return _seconds(lambda: Reader(path, None).fill(tensors), times=3)


def _seconds(work: Callable[[], object], times: int = 100) -> float:
    """Return the mean CPU time of a call, of this process with all its threads."""
    if times > 1:
        work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


if __name__ == "__main__":
    main()
