"""scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels in 10 classes, included in the package."""

from importlib.util import find_spec

import numpy as np

from project.data.images import Images
from project.data.loaders import BatchedData, BatchedDataset

HELD_OUT = {"val": 180, "test": 360}  # images: a tenth and a fifth


class Digits(BatchedData):
    """Handwritten digits from scikit-learn.

    Raises ModuleNotFoundError without scikit-learn, which is an optional extra because it installs SciPy.

    Args:
        image_size: height and width in pixels, at least the digits' 8; the rest is a black border.
    """

    def __init__(self, image_size: int, batch_size: int = 64, num_workers: int = 0, pin_memory: bool = False) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.image_size = image_size
        if find_spec("sklearn") is None:
            raise ModuleNotFoundError(
                "data=digits reads its images from scikit-learn, which is not installed; "
                "type pip install -e '.[digits]'"
            )

    def load(self) -> dict[str, BatchedDataset]:
        from sklearn.datasets import load_digits  # takes a second, and is optional

        digits = load_digits()
        # The file is ordered by writer; the split is the same in every run, whatever its seed.
        order = np.random.default_rng(0).permutation(len(digits.target))
        val, test, train = np.split(order, [HELD_OUT["val"], HELD_OUT["val"] + HELD_OUT["test"]])
        return {
            split: Images(digits.images[part], digits.target[part], 16, self.image_size)
            for split, part in (("train", train), ("val", val), ("test", test))
        }
