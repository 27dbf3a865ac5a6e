"""A sequence of tokens as a data set of windows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from project.data.loaders import BatchedDataset, Pair


class Windows(BatchedDataset):
    """Windows of `context` tokens, each beginning where the last one ended, and the tokens that follow theirs.

    An epoch predicts each token but the first once; a rest shorter than a window is left out. The windows are a view:
    a memory-mapped sequence is read as batches ask for it.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], context: int) -> None:
        self.windows = sliding_window_view(tokens, context + 1)[::context]  # (windows, context + 1), each overlaps by 1

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        tokens = self.windows[indices].astype(np.int64)
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])  # each (batch, context)
