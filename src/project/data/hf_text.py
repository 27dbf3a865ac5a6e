"""Text files as token ids of a pretrained tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from project.data.files import File
from project.data.loaders import BatchedDataset
from project.data.text import TextFiles, parts, text_of
from project.data.windows import Windows
from project.hub import folder_of, read_tokenizer, require


class HFText(TextFiles):
    """Text files as windows of token ids; each file is a document that ends with the tokenizer's end-of-text token.

    Args:
        tokenizer: a folder, or the name of a hub repository in the local cache.
        download: download files of the hub that are not in the cache.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as TextFiles does, and for a tokenizer that is missing.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        context: int,
        tokenizer: str | None,
        download: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(files, context, batch_size, num_workers, pin_memory)
        require("transformers")
        if tokenizer is None:
            raise ValueError("tokenizer: none is set; type data.tokenizer=FOLDER, or the name of a hub repository")
        self.tokenizer = read_tokenizer(folder_of(tokenizer, "data.tokenizer", download))

    def load(self) -> dict[str, BatchedDataset]:
        tokens = np.concatenate([self.encoded(file) for file in self.files])
        self.largest_id = int(tokens.max(initial=0))
        splits = parts(tokens)
        if min(map(len, splits.values())) <= self.context:
            raise ValueError(
                f"found {len(tokens)} tokens in {len(self.files)} files; a tenth of them must hold a window of "
                f"{self.context}; give more data.files, or a smaller model.context"
            )
        return {split: Windows(part, self.context) for split, part in splits.items()}

    def encoded(self, file: File) -> NDArray[np.uint32]:
        text = text_of(file).decode("utf-8", errors="replace")
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return np.array(ids if end is None else [*ids, end], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text
