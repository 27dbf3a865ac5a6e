"""Cross-validation: the folds of a map-style dataset."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset


class Folds(Sequence[tuple[Subset[Any], Subset[Any]]]):
    """The training and validation sets of each fold; every sample is in the validation set of one fold.

    A data module takes one: `train, val = Folds(dataset, self.folds)[self.fold]`, and the sweep
    `python train.py -m data.fold=0,1,2,3,4` trains on all of them. The folds are the same in every run, whatever its
    seed.

    Raises ValueError for fewer than two folds, or more than there are samples.
    """

    def __init__(self, dataset: Dataset[Any], folds: int = 5) -> None:
        samples = len(dataset)  # type: ignore[arg-type]  # a map-style dataset has a length
        if not 2 <= folds <= samples:
            raise ValueError(f"data.folds is {folds}; expected 2 or more, and at most the {samples} samples")
        self.dataset = dataset
        self.held_out = np.array_split(np.random.default_rng(0).permutation(samples), folds)

    def __len__(self) -> int:
        return len(self.held_out)

    def __getitem__(self, fold: Any) -> Any:
        if not 0 <= fold < len(self):
            raise IndexError(f"there is no fold {fold} of {len(self)}")
        rest = np.concatenate([part for number, part in enumerate(self.held_out) if number != fold])
        return tuple(Subset(self.dataset, np.sort(part).tolist()) for part in (rest, self.held_out[fold]))
