"""What real processes hold in a step, by the ledger that plans are made with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightswitch.planning.estimate import STATES
from lightswitch.planning.timeline import KINDS
from lightswitch.planning.tracking import Tracking
from tests.engine.data.pictures import Pictures, pictures
from tests.engine.data.text import Text, Windows, sentences


class Truth(Tracking):
    """Writes the least of the peaks of steps 2 and 3, and of what fsdp offloads and what it does not, apart.

    A step's own varies: gloo's threads keep what they have sent until they come to run.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        steps = self.steps()[1:]
        least = min((step.timeline.peak() for step in steps), key=lambda peak: peak.bytes)
        offloaded = (*STATES, "update")
        parts = {"host": offloaded, "device": [kind for kind in KINDS if kind not in offloaded]}
        apart = {
            f"{name}_bytes": min(step.timeline.only(kinds).peak().bytes for step in steps)
            for name, kinds in parts.items()
        }
        told = {**asdict(least), **apart, "flops": steps[0].flops}
        (self.folder / f"peak_{trainer.global_rank}.json").write_text(json.dumps(told))


class _Numbers(Dataset[Any]):
    """Samples kept as Python's numbers: on a CPU, tensors of the data would be in the same memory as the model's."""

    def __init__(self, samples: Iterable[Sequence[Tensor]]) -> None:
        self.samples = [tuple((part.tolist(), part.dtype) for part in sample) for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(numbers, dtype=dtype) for numbers, dtype in self.samples[index])


class _Shuffled(RandomSampler):
    """A sampler of a class of its own, whose order is kept as Python's numbers, too, and not as a tensor's."""


def _loader(samples: Iterable[Sequence[Tensor]]) -> DataLoader[Any]:
    numbers = _Numbers(samples)
    return DataLoader(numbers, batch_size=8, sampler=_Shuffled(numbers))


class NumbersOfText(Text):
    def train_dataloader(self) -> Any:
        windows = Windows(sentences(9_000, seed=1), self.context)
        return _loader(windows[i] for i in range(len(windows)))


class NumbersOfPictures(Pictures):
    def train_dataloader(self) -> Any:
        return _loader(pictures(self.samples, seed=1))
