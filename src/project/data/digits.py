"""scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels in 10 classes, included in the package."""

from importlib.util import find_spec

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from project.data.folds import Folds
from project.data.images import Images
from project.data.loaders import BatchedData, Pair

HELD_OUT = {"val": 180, "test": 360}  # images: a tenth and a fifth


class Digits(BatchedData):
    """Handwritten digits from scikit-learn.

    Raises ModuleNotFoundError without scikit-learn, which is an optional extra because it installs SciPy.

    Args:
        image_size: height and width in pixels, at least the digits' 8; the rest is a black border.
        fold: number, from 0, of the fold to validate, of all images but those of the test; None for the usual split.
        folds: number of folds.
    """

    def __init__(
        self,
        image_size: int,
        fold: int | None = None,
        folds: int = 5,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.image_size = image_size
        self.fold, self.folds = fold, folds
        if fold is not None and not 0 <= fold < folds:
            raise ValueError(f"data.fold is {fold}; expected 0 to {folds - 1}, as data.folds is {folds}")
        if find_spec("sklearn") is None:
            raise ModuleNotFoundError(
                "data=digits reads its images from scikit-learn, which is not installed; "
                "type pip install -e '.[digits]'"
            )

    def load(self) -> dict[str, Dataset[Pair]]:
        from sklearn.datasets import load_digits  # takes a second, and is optional

        digits = load_digits()
        # The file is ordered by writer; the split is the same in every run, whatever its seed.
        order = np.random.default_rng(0).permutation(len(digits.target))
        val, test, train = np.split(order, [HELD_OUT["val"], HELD_OUT["val"] + HELD_OUT["test"]])
        splits: dict[str, Dataset[Pair]] = {
            split: Images(digits.images[part], digits.target[part], 16, self.image_size)
            for split, part in (("train", train), ("val", val), ("test", test))
        }
        if self.fold is not None:
            both: Dataset[Pair] = ConcatDataset([splits["train"], splits["val"]])
            splits["train"], splits["val"] = Folds(both, self.folds)[self.fold]
        return splits
