"""Streams of other libraries, read as the engine reads them: what holds of them.

pip install datasets torchdata webdataset
python -m tests.engine.batches.elsewhere
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import torchdata.nodes
import webdataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightswitch.batches.loaders import obstacle, training_loader
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.errors import Refused

SAMPLES = 61
WHOLE, CUT = BatchPlan(8, 8, 1, 1), BatchPlan(8, 2, 2, 2)
STEPS, SAVED = 6, 4  # read before a run ends; its checkpoint's


class Nodes(IterableDataset):
    """Nodes of torchdata as a stream: with the state of a node, and no loader of its own."""

    def __init__(self) -> None:
        self.node = torchdata.nodes.IterableWrapper(range(SAMPLES))
        self.state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[int]:
        self.node.reset(self.state)
        self.state = None
        yield from self.node

    def state_dict(self) -> dict[str, Any]:
        return self.node.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Plain(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def streams(folder: Path) -> dict[str, Callable[[], Any]]:
    rows = datasets.Dataset.from_dict({"id": list(range(SAMPLES))})

    def tars(**options: Any) -> Any:
        return webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False, **options)

    def ids(tar: Any) -> Any:
        return tar.decode().to_tuple("id.cls").map(lambda sample: {"id": sample[0]})

    return {
        "datasets: to_iterable_dataset(num_shards=6)": lambda: rows.to_iterable_dataset(num_shards=6),
        "datasets: … .map": lambda: rows.to_iterable_dataset(num_shards=6).map(lambda row: {"id": row["id"]}),
        "datasets: … .shuffle(buffer_size=10)": lambda: rows.to_iterable_dataset(6).shuffle(3, buffer_size=10),
        "torchdata: a node in an IterableDataset": Nodes,
        "torchdata: StatefulDataLoader of a stream": Plain,
        "webdataset": lambda: ids(tars()),
        "webdataset: .shuffle(10, rng=random)": lambda: ids(tars().shuffle(10, rng=random)),
        "webdataset: .shuffle(10)": lambda: ids(tars().shuffle(10)),
        "webdataset: nodesplitter=None": lambda: ids(tars(nodesplitter=None)),
    }


def write_tars(folder: Path) -> None:
    for number in range(4):
        with webdataset.TarWriter(str(folder / f"{number}.tar")) as tar:
            for index in range(number, SAMPLES, 4):
                tar.write({"__key__": f"{index:04}", "id.cls": str(index).encode()})


def read(loader: Any, count: int | None = None) -> list[list[int]]:
    return [(batch["id"] if isinstance(batch, dict) else batch).tolist() for batch in islice(loader, count)]


def report(name: str, make: Callable[[], Any]) -> str:
    kind = StatefulDataLoader if "StatefulDataLoader" in name else DataLoader

    def shared(plan: BatchPlan = WHOLE, rank: int = 0, step: int = 0, **options: Any) -> Any:
        loader = kind(make(), 3, **options)
        return training_loader(loader, plan, rank, 1, Position(step=step))

    whole = read(shared())
    first, second = (read(shared(CUT, rank)) for rank in range(2))
    cut = [sorted(chain(*first[at : at + 2], *second[at : at + 2])) for at in range(0, 2 * STEPS, 2)]
    found = {"the same at any cut": cut == [sorted(step) for step in whole[:STEPS]]}
    for workers in (0, 2):
        try:
            found[f"{workers} workers"] = read(shared(num_workers=workers)) == whole
        except Refused:
            found[f"{workers} workers"] = False
            continue
        before, after = shared(num_workers=workers), shared(step=SAVED)
        read(before, STEPS)
        kept = before.sampler.state_at(SAVED)
        after.sampler.start_at(0, SAVED, kept)
        found["goes on at once" if kept["state"] else "goes on by skipping"] = read(after) == whole[SAVED:]
    words = (words if holds else f"NOT {words}" for words, holds in found.items())
    return f"{name}: {len({*chain(*whole)})} samples; {', '.join(words)}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tars(Path(folder))
        for name, make in streams(Path(folder)).items():
            print(report(name, make), flush=True)
    stateful, plain = (kind(range(SAMPLES), 3, shuffle=True) for kind in (StatefulDataLoader, DataLoader))
    same = [read(training_loader(loader, WHOLE, 0, 1, Position())) for loader in (stateful, plain)]
    print(
        f"torchdata: StatefulDataLoader of a map-style dataset: {'' if same[0] == same[1] else 'NOT '}as a DataLoader"
    )
    split = split_dataset_by_node(datasets.Dataset.from_dict({"id": [1, 2]}).to_iterable_dataset(2), 0, 2)
    print(f"datasets: split_dataset_by_node: known to split itself by {split._distributed}")
    for loader in (torchdata.nodes.Loader(Nodes().node), webdataset.WebLoader(Plain(), batch_size=None)):
        print(f"runs as it is: {obstacle(loader)}")


if __name__ == "__main__":
    main()
