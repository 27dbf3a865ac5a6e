"""nanoGPT's token files: `train.bin`, `val.bin` and optionally `test.bin`, with token ids as raw uint16."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from project.data.loaders import BatchedData, BatchedDataset
from project.data.windows import Windows

CHECKED_TOKENS = 2**20  # of each file: enough to detect a wrong vocabulary, without reading all of a large file


class TokenFiles(BatchedData):
    """Windows over memory-mapped files in nanoGPT's format; without `test.bin`, `val.bin` is also the test set.

    Raises FileNotFoundError for missing files, and ValueError for one that is too short, is not uint16 or, in its first
    million tokens, has an id outside of the model's vocabulary.

    Args:
        folder: folder with `train.bin` and `val.bin`.
        context: length of a window, in tokens.
        vocab_size: size of the model's vocabulary, which limits the ids; None for a model that checks `largest_id`
            itself.
    """

    def __init__(
        self,
        folder: str,
        context: int,
        vocab_size: int | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.context = context
        self.files = found(Path(folder).expanduser())
        self.largest_id = max(checked(file, context, vocab_size) for file in self.files.values())

    def load(self) -> dict[str, BatchedDataset]:
        return {split: Windows(mapped(file), self.context) for split, file in self.files.items()}


def found(folder: Path) -> dict[str, Path]:
    files = {split: folder / f"{split}.bin" for split in ("train", "val", "test")}
    if not files["test"].is_file():
        files["test"] = files["val"]
    if missing := sorted({file.name for file in files.values() if not file.is_file()}):
        raise FileNotFoundError(
            f"data.folder: {folder} has no {' and no '.join(missing)}; expected nanoGPT's token files (raw uint16), "
            "as its data/*/prepare.py writes them; type data.folder=FOLDER of these files"
        )
    return files


def checked(file: Path, context: int, vocab_size: int | None) -> int:
    """Return the largest id among the first tokens of a file. Raises ValueError if the file is not valid."""
    size_bytes = file.stat().st_size
    if size_bytes % 2 or size_bytes < 2 * (context + 1):
        raise ValueError(
            f"{file} has {size_bytes} bytes; expected 2 for each token, and more than {context} "
            "tokens; write it as numpy.uint16, or use a smaller model.context"
        )
    largest = int(mapped(file)[:CHECKED_TOKENS].max())
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{file} has token id {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
            "set model.vocab_size to the tokenizer's size (GPT-2's is 50257), or choose the model that fits"
        )
    return largest


def mapped(file: Path) -> NDArray[np.uint16]:
    return np.memmap(file, dtype=np.uint16, mode="r")
