"""Small grey images and their classes as an in-memory dataset."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from project.data.loaders import BatchedDataset, Pair


class Images(BatchedDataset):
    """Dataset of images (images, height, width) with grey values from 0 to `brightest`.

    Samples are (1, image_size, image_size), from -1 to 1. Smaller images get a black border. Raises ValueError for
    larger ones.
    """

    def __init__(
        self, images: NDArray[np.generic], labels: NDArray[np.generic], brightest: int, image_size: int
    ) -> None:
        self.images = bordered(torch.from_numpy(images.astype(np.uint8)).unsqueeze(1), image_size)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.brightest = brightest

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        chosen = torch.tensor(indices)
        images = self.images[chosen].float().mul_(2 / self.brightest).sub_(1)  # (batch, 1, size, size)
        return images, self.labels[chosen]  # (batch,)


def bordered(images: Tensor, image_size: int) -> Tensor:
    height, width = images.shape[-2:]
    if image_size < max(height, width):
        raise ValueError(
            f"found images of {height} × {width}, larger than data.image_size={image_size}; "
            f"use data.image_size={max(height, width)} or more"
        )
    above, left = (image_size - height) // 2, (image_size - width) // 2
    return F.pad(images, (left, image_size - width - left, above, image_size - height - above))
