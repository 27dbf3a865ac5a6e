"""Fashion-MNIST (Xiao et al. 2017): 70,000 images of clothes, 28 × 28 pixels in 10 classes, in MNIST's IDX files."""

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from project.data.images import Images
from project.data.loaders import BatchedData, BatchedDataset

FILES = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
UNSIGNED_BYTE = 8  # IDX code of the number type in these files


class FashionMNIST(BatchedData):
    """Fashion-MNIST from four files, gzipped or not; the last twelfth of the training set is the validation set.

    Raises FileNotFoundError for missing files.

    Args:
        folder: folder with the four files.
        image_size: height and width in pixels, at least the images' 28; the rest is a black border.
    """

    def __init__(
        self,
        folder: str,
        image_size: int,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.image_size = image_size
        self.files = found(Path(folder).expanduser())

    def load(self) -> dict[str, BatchedDataset]:
        arrays = {name: read_idx(file) for name, file in self.files.items()}
        images, labels = arrays["train images"], arrays["train labels"]
        val = len(labels) // 12  # 5,000 of 60,000
        return {
            "train": self.images(images[:-val], labels[:-val]),
            "val": self.images(images[-val:], labels[-val:]),
            "test": self.images(arrays["test images"], arrays["test labels"]),
        }

    def images(self, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Images:
        return Images(images, labels, 255, self.image_size)


def found(folder: Path) -> dict[str, Path]:
    """Return the path of each of the four files; a plain file is preferred to a gzipped one."""
    files, missing = {}, []
    for name, stem in FILES.items():
        present = [file for file in (folder / stem, folder / f"{stem}.gz") if file.is_file()]
        if present:
            files[name] = present[0]
        else:
            missing.append(f"{stem}.gz")
    if missing:
        raise FileNotFoundError(
            f"data.folder: {folder} has no {', '.join(missing)}; fetch them from "
            f"https://github.com/zalandoresearch/fashion-mnist (data/fashion) into {folder}, or on Debian and Ubuntu "
            "install the package dataset-fashion-mnist and type data.folder=/usr/share/datasets/fashion-mnist"
        )
    return files


def read_idx(file: Path) -> NDArray[np.uint8]:
    """Return the array of an IDX file: two zero bytes, type, number of dimensions, each size as uint32, values."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        content = stream.read()
    zeros, kind, dimensions = struct.unpack_from(">HBB", content) if len(content) >= 4 else (1, 0, 0)
    if zeros != 0 or kind != UNSIGNED_BYTE:
        raise ValueError(f"{file} begins with {content[:4].hex()}; expected an IDX file of unsigned bytes (000008..)")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
    if len(values) != np.prod(shape):
        raise ValueError(f"{file} holds {len(values)} values for a shape of {shape}; fetch it again, it is incomplete")
    return values.reshape(shape)
