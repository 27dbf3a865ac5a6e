"""Speed of packed shards against tokens in memory, and the memory that it takes to read gigabytes of them.

python -m benchmarks.shards --gib 10
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data import formed
from benchmarks.results import FOLDER, Options, Row, interleaved, publish, row
from project.data.loaders import BatchedDataset
from project.data.windows import ShardWindows, Windows
from project.models.gpt import GPT

SHARD_TOKENS = 2**24  # 32 MiB each, as for a corpus of 8 GiB
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once and briefly: to see that it runs")
    parser.add_argument("--gib", type=float, default=2, help="of shards, to read through")
    parser.add_argument("--out", type=Path, default=FOLDER / "shards.json", help="the JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        gib = 0.125 if given.quick else given.gib
        files = list(written(Path(folder), int(gib * 2**30)))
        memory = read_through(files)
        rows = [training(files, given.quick), loading(files, given.quick)]
    publish(rows, Options(given.quick, given.out), per="a batch")
    print(
        f"{gib:g} GiB read in a random order: memory of its own grew by {memory['own_mib']:.1f} MiB; "
        f"{memory['mapped_mib']:.0f} MiB of files were mapped, which the kernel takes back where memory is short"
    )
    content = json.loads(given.out.read_text()) | {"memory": {"gib": gib, **memory}}
    given.out.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def written(folder: Path, size_bytes: int) -> Iterator[Path]:
    random = np.random.default_rng(0)
    for number in range(max(2, size_bytes // (2 * SHARD_TOKENS))):
        file = folder / f"train_{number:05}.bin"
        random.integers(0, 256, SHARD_TOKENS, np.uint16).tofile(file)
        yield file


def read_through(files: list[Path]) -> dict[str, float]:
    """Return the MiB, of its own and of mapped memory, by which a process grows when it reads each window once."""
    windows = ShardWindows(files, np.uint16, 1024)
    order = np.random.default_rng(0).permutation(len(windows)).reshape(-1)
    for begin in range(0, 640, 64):  # allocates buffers
        windows.__getitems__(order[begin : begin + 64].tolist())
    before = resident_mib()
    for begin in range(0, len(order), 64):
        windows.__getitems__(order[begin : begin + 64].tolist())
    after = resident_mib()
    return {"own_mib": after["RssAnon"] - before["RssAnon"], "mapped_mib": after["RssFile"] - before["RssFile"]}


def resident_mib() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss"))
    return {name.rstrip(":"): int(kib) / 1024 for name, kib, _ in lines}


def training(files: list[Path], quick: bool) -> Row:
    """Compare training steps of the smallest model of conf; any other spends less of its time on data."""
    return compare("training, 64 × 64", files, 64, "≥ 0.9", quick, 20, Stepping())


def loading(files: list[Path], quick: bool) -> Row:
    return compare("loading alone, 64 × 1024", files, 1024, "", quick, 200, lambda batch: None)


def compare(
    name: str, files: list[Path], context: int, target: str, quick: bool, batches: int, use: Callable[[Any], None]
) -> Row:
    batches = 3 if quick else batches
    used = files[:8]  # 256 MiB, which fit into memory
    in_memory = np.concatenate([np.fromfile(file, np.uint16) for file in used])
    contenders = {
        name: reader(ShardWindows(used, np.uint16, context), batches, use),
        "in memory": reader(Windows(in_memory, context), batches, use),
    }
    return row(name, "in memory", interleaved(contenders, 1 if quick else 9), target, invert=True)


def reader(windows: BatchedDataset, batches: int, use: Callable[[Any], None]) -> Callable[[], float]:
    """Return a function that measures CPU seconds per batch, without the first batch, which draws the epoch's order."""
    loader = DataLoader(windows, 64, shuffle=True, collate_fn=formed)

    def cpu_seconds() -> float:
        stream = iter(loader)
        use(next(stream))
        start = time.process_time()
        for _ in range(batches):
            use(next(stream))
        return (time.process_time() - start) / batches

    return cpu_seconds


class Stepping:
    """Optimizer steps of conf/model/gpt.yaml."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(256, 64, layers=2, heads=2, width=64, optimizer=partial(torch.optim.AdamW, lr=1e-3))
        self.model.configure_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def __call__(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model.loss(batch).backward()
        self.optimizer.step()


if __name__ == "__main__":
    main()
