"""Datasets of windows over sequences of tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from project.data.loaders import BatchedDataset, Pair


class Windows(BatchedDataset):
    """Consecutive windows of `context` tokens, each with the tokens that follow its own.

    An epoch predicts each token but the first once; a remainder shorter than a window is left out. The windows are a
    view: a memory-mapped sequence is read only when batches need it.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], context: int) -> None:
        self.windows = sliding_window_view(tokens, context + 1)[::context]  # (windows, context + 1), each overlaps by 1

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        return inputs_and_targets(self.windows[indices])


class ManyWindows(BatchedDataset):
    """The windows of several sequences, one sequence after another; no window spans two of them."""

    def __init__(self, sequences: Sequence[NDArray[np.unsignedinteger]], context: int) -> None:
        self.context, self.dtype = context, np.dtype(sequences[0].dtype)
        self.bytes = [tokens.view(np.uint8).data for tokens in sequences]
        counts = [max(0, len(tokens) - 1) // context for tokens in sequences]
        self.ends = np.cumsum(counts)
        self.begins = self.ends - counts

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        places = np.asarray(indices)
        numbers = np.searchsorted(self.ends, places, side="right")
        begins = (places - self.begins[numbers]) * self.context * self.dtype.itemsize
        size = (self.context + 1) * self.dtype.itemsize
        # Slices of bytes in a loop: slices of arrays take twice as long, and so does indexing once per sequence.
        rows = [
            self.bytes[number][at : at + size] for number, at in zip(numbers.tolist(), begins.tolist(), strict=True)
        ]
        return inputs_and_targets(np.frombuffer(b"".join(rows), self.dtype).reshape(len(rows), -1))


class ShardWindows(ManyWindows):
    """The windows of memory-mapped files of token ids; a process that receives them by pickle maps the files again."""

    def __init__(self, files: Sequence[Path], dtype: type[np.unsignedinteger], context: int) -> None:
        self.files = files
        super().__init__([np.memmap(file, dtype=dtype, mode="r") for file in files], context)

    def __reduce__(self) -> tuple[type["ShardWindows"], tuple[object, ...]]:
        return ShardWindows, (self.files, self.dtype.type, self.context)


class Mixture(BatchedDataset):
    """Datasets mixed by weight: each has its share of the samples, and is repeated until every dataset was read
    once."""

    def __init__(self, datasets: Sequence[BatchedDataset], weights: Sequence[float]) -> None:
        self.datasets = datasets
        shares = np.array(weights) / sum(weights)
        sizes = np.array([len(dataset) for dataset in datasets])
        self.sizes = sizes
        # samples of the dataset that lasts longest are read once, those of the others at least once
        self.ends = np.cumsum(np.maximum(sizes, np.rint((sizes / shares).max() * shares)).astype(np.int64))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        places = np.asarray(indices)
        numbers = np.searchsorted(self.ends, places, side="right")
        order = np.argsort(numbers, kind="stable")
        pairs = []
        for number in np.unique(numbers):
            begin = self.ends[number - 1] if number else 0
            chosen = (places[numbers == number] - begin) % self.sizes[number]
            pairs.append(self.datasets[number].__getitems__(chosen.tolist()))
        back = torch.from_numpy(np.argsort(order))
        inputs, targets = (torch.cat(parts)[back] for parts in zip(*pairs, strict=True))
        return inputs, targets


def inputs_and_targets(windows: NDArray[np.unsignedinteger]) -> Pair:
    """Return windows (batch, context + 1) as token ids and the ids that follow them, each (batch, context).

    Both are contiguous copies, which a GPU can read directly; a view with gaps would be copied again.
    """
    return torch.from_numpy(windows[:, :-1].astype(np.int64)), torch.from_numpy(windows[:, 1:].astype(np.int64))
