"""Time to load a batch by `__getitems__`, against default collation of the same samples.

python -m benchmarks.data
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.results import Row, interleaved, options, publish, row
from project.data.images import Images
from project.data.loaders import BatchedDataset, Pair
from project.data.tokens import mapped
from project.data.windows import Windows


class ImageSamples(Dataset[Pair]):
    def __init__(self, images: Images) -> None:
        self.data = images

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Pair:
        image = self.data.images[index].float().mul_(2 / self.data.brightest).sub_(1)
        return image, self.data.labels[index]


class WindowSamples(Dataset[Pair]):
    """Samples read from a memory-mapped file as nanoGPT's get_batch reads them."""

    def __init__(self, file: Path, context: int) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Pair:
        begin = index * self.context
        end = begin + self.context
        inputs = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        return inputs, torch.from_numpy(self.tokens[begin + 1 : end + 1].astype(np.int64))


def main() -> None:
    given = options("data", __doc__.splitlines()[0])
    torch.set_num_threads(1)
    publish([images(given.quick), tokens(given.quick)], given, per="a batch")


def images(quick: bool) -> Row:
    random = np.random.default_rng(0)
    batched = Images(random.integers(0, 256, (70_000, 28, 28)), random.integers(0, 10, 70_000), 255, 28)
    return compare("images, 128 of 28 × 28", batched, ImageSamples(batched), 128, "≥ 2.5", quick)


def tokens(quick: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.bin")
        np.random.default_rng(0).integers(0, 50_257, 20_000_000).astype(np.uint16).tofile(file)
        batched = Windows(mapped(file), 256)
        return compare("tokens, 64 × 256", batched, WindowSamples(file, 256), 64, "≥ 10", quick)


def compare(
    name: str, batched: BatchedDataset, samples: Dataset[Pair], batch_size: int, target: str, quick: bool
) -> Row:
    batches = 5 if quick else 500
    contenders = {
        name: _reader(DataLoader(batched, batch_size, shuffle=True, collate_fn=formed), batches),
        "default collation": _reader(DataLoader(samples, batch_size, shuffle=True), batches),
    }
    seconds = interleaved(contenders, 1 if quick else 9)
    return row(name, "default collation", seconds, target, invert=True)


def formed(batch: Pair) -> Pair:
    """Return a batch as the data set has formed it, in place of a collate function."""
    return batch


def _reader(loader: DataLoader[Any], batches: int) -> Callable[[], float]:
    """Return a function that measures CPU seconds per batch, without the first batch, which draws the epoch's order."""

    def cpu_seconds() -> float:
        stream = _endless(loader)
        next(stream)
        start = time.process_time()
        for _ in range(batches):
            next(stream)
        return (time.process_time() - start) / batches

    return cpu_seconds


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
