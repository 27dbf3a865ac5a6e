"""Windows over bytes of text, in batches that the dataset makes itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

WORDS = "a all and are at be but by can do end find for from go in is it not of on or out rank run so step the to we"
Batch = tuple[Tensor, Tensor]


class Windows(Dataset[Batch]):
    """Windows of `context` bytes and the bytes that follow theirs; `__getitems__` reads a batch at once."""

    def __init__(self, text: bytes, context: int) -> None:
        self.windows = torch.tensor(list(text)).unfold(0, context + 1, context)  # each overlaps the next by a byte

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Batch:
        return self.windows[index, :-1], self.windows[index, 1:]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return self[list(indices)]


class Text(pl.LightningDataModule):
    """Sentences of random words, the same in every process."""

    def __init__(self, context: int = 32) -> None:
        super().__init__()
        self.context = context

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.loader(9_000, seed=1, shuffle=True)  # 281 windows of 32: no whole number of batches

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.loader(1_100, seed=2)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.loader(1_200, seed=3)

    predict_dataloader = test_dataloader

    def loader(self, length: int, seed: int, shuffle: bool = False) -> DataLoader[Batch]:
        windows = Windows(sentences(length, seed), self.context)
        return DataLoader(windows, batch_size=8, shuffle=shuffle, collate_fn=as_it_is)


def sentences(length: int, seed: int) -> bytes:
    """So many bytes, in lines of about 60."""
    words = random.Random(seed).choices(WORDS.split(), k=length)
    lines = (" ".join(words[start : start + 16]) for start in range(0, len(words), 16))
    return "\n".join(lines).encode()[:length]


def as_it_is(batch: Batch) -> Batch:
    return batch
