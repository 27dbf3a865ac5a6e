"""Text datasets of the Hugging Face hub, or of files that the library `datasets` reads, as windows of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from project.data.loaders import BatchedData, Pair
from project.data.tokenizer import Tokenizer, named
from project.data.windows import inputs_and_targets

SPLITS = {"train": "train", "val": "validation", "test": "test"}


class HFDataset(BatchedData):
    """Windows over the text of a dataset, map-style or streamed, with a token at the end of each document.

    The library keeps what it has downloaded and tokenized in its cache; with HF_HUB_OFFLINE=1, it asks no network. It
    groups documents by the thousand, and leaves out the rest of each group that is shorter than a window.

    Args:
        path: a dataset of the hub, a folder of files, or a format such as json, with `files`.
        context: length of a window, in tokens.
        name: configuration of the dataset.
        files: files by split, as for `datasets.load_dataset`.
        splits: the dataset's splits for train, val and test, also sliced: {train: "train[:90%]", val: "train[90%:]"}.
        text: column with the text.
        tokenizer: bytes, a tokenizer.json, a folder with one, or a repository in the hub's cache.
        streaming: read while training, instead of downloading and tokenizing everything before.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: the dataset, a split, its column or a package is missing.
    """

    def __init__(
        self,
        path: str,
        context: int,
        name: str | None = None,
        files: Mapping[str, Any] | None = None,
        splits: Mapping[str, str] | None = None,
        text: str = "text",
        tokenizer: str | None = None,
        download: bool = False,
        streaming: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        if find_spec("datasets") is None:
            raise ModuleNotFoundError("data=hf_dataset needs a package; type pip install -e '.[datasets]'")
        self.path, self.name, self.files, self.text = path, name, files, text
        self.names = {**SPLITS, **(splits or {})}
        self.context, self.streaming = context, streaming
        self.tokenizer = named(tokenizer or "bytes", download=download)
        self.largest_id = self.tokenizer.vocab_size - 1

    def prepare_data(self) -> None:
        if not self.streaming:  # other processes of the node read what this one puts into the cache
            self.load()

    def load(self) -> dict[str, Dataset[Pair]]:
        return {split: self.windows(name) for split, name in self.names.items()}

    def windows(self, name: str) -> Any:
        from datasets import load_dataset

        options = {"data_files": self.files} if self.files else {}
        try:
            rows = load_dataset(self.path, self.name, split=name, streaming=self.streaming, **options)
        except (OSError, ValueError) as error:  # what the library raises of a name, a split or a network
            reason = str(error).splitlines()[0].rstrip(".")
            given = ", ".join(f"{split}: {name}" for split, name in self.names.items())
            raise ValueError(
                f"data.path={self.path}: {reason}; the splits of the dataset are read as {given}"
            ) from error
        if rows.column_names is not None and self.text not in rows.column_names:
            raise ValueError(f"data.text={self.text}: {self.path} has the columns {', '.join(rows.column_names)}")
        grouped = Grouped(self.tokenizer, self.text, self.context)
        return rows.map(grouped, batched=True, remove_columns=rows.column_names).with_format("numpy")

    def collate(self, rows: list[dict[str, Any]]) -> Pair:
        return inputs_and_targets(np.stack([row["ids"] for row in rows]))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


class Grouped:
    """Function from a batch of rows to their windows of `context` tokens, each with the token that follows it."""

    def __init__(self, tokenizer: Tokenizer, text: str, context: int) -> None:
        self.tokenizer, self.text, self.context = tokenizer, text, context

    def __call__(self, rows: Mapping[str, Sequence[str]]) -> dict[str, list[list[int]]]:
        ids: list[int] = []
        for text in rows[self.text]:
            ids += [*self.tokenizer.encode(text).tolist(), self.tokenizer.document_end]
        size = self.context
        return {"ids": [ids[begin : begin + size + 1] for begin in range(0, len(ids) - size, size)]}
