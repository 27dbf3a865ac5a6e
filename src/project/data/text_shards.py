"""Many files of text, tokenized while they are read, or packed before by `python -m project.data.pack`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from project.data import packed
from project.data.documents import Piece, Reading, documents, split
from project.data.files import File, found
from project.data.loaders import BatchedData, BatchedDataset, Pair
from project.data.packed import Packed
from project.data.text_stream import TextStream, with_end
from project.data.tokenizer import Tokenizer, named
from project.data.windows import ManyWindows, Mixture, ShardWindows

SPLITS = ("train", "val", "test")
Splits = dict[str, list[Piece]]


class TextShards(BatchedData):
    """Documents as windows of `context` tokens; each document ends with the tokenizer's end token.

    `sources` are packed folders, or paths, addresses and globs of text, JSON lines (`.jsonl`) and Parquet files. With
    `weights`, one per source, training mixes windows of the sources by weight; without, the sources are read as one.
    Files that are not packed are read as a stream: their order depends on (seed, epoch), and windows are shuffled
    within blocks of `buffer_windows`. Validation and test read each window of their documents once, whatever the
    weights.

    Raises FileNotFoundError for a pattern without files, ModuleNotFoundError for a library that is not installed, and
    ValueError for arguments that do not fit together and for files that can't be read.

    Args:
        sources: packed folders, or paths, addresses and globs of files.
        context: length of a window, in tokens.
        vocab_size: size of the model's vocabulary, which limits the ids; None for a model that checks `largest_id`
            itself.
        seed: of the order of files and windows.
        weights: share of each source in a mixture, in proportion; None reads all sources as one.
        tokenizer: a tokenizer's file, a folder with one, the name of a hub repository in the local cache, or bytes;
            None for the packed folders' tokenizer, else bytes.
        download: download files of the hub that are not in the cache.
        document_end: the token that ends a document; None for the tokenizer's usual one.
        key: key of the text in a JSON line, and name of its column in Parquet.
        separator: text between two documents of a text file; None if each file is one document.
        val: files for validation, in place of held-out documents.
        test: files for the test, in place of held-out documents.
        held_out_bytes: bytes of documents to hold out for validation and for test each; a tenth of the files at most.
        buffer_windows: number of windows of a stream that are shuffled together.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        context: int,
        vocab_size: int | None = None,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        tokenizer: str | None = None,
        download: bool = False,
        document_end: str | None = None,
        key: str = "text",
        separator: str | None = None,
        val: str | Sequence[str] = (),
        test: str | Sequence[str] = (),
        held_out_bytes: int = 2**18,
        buffer_windows: int = 1024,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.context, self.seed, self.buffer_windows = context, seed, buffer_windows
        if buffer_windows < 1:
            raise ValueError(f"data.buffer_windows is {buffer_windows}; expected at least 1")
        names = listed(sources)
        self.weights = checked_weights(weights, names)
        self.given: list[Packed] | list[Splits]
        if are_packed(names):
            self.given = [packed.read(Path(name).expanduser()) for name in names]
            self.tokenizer = common_tokenizer(self.given, tokenizer, download, {"val": val, "test": test})
        else:
            self.tokenizer = named(tokenizer or "bytes", document_end, download=download)
            self.reading = Reading.typed(key, separator)
            val_files, test_files = of_split(val, "data.val"), of_split(test, "data.test")
            groups = [names] if weights is None else [[name] for name in names]
            self.given = [
                split(found(group, "data.sources"), val_files, test_files, self.reading, held_out_bytes // len(groups))
                for group in groups
            ]
        self.largest_id = self.tokenizer.vocab_size - 1
        if vocab_size is not None and self.largest_id >= vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, but the model's vocabulary ends at "
                f"{vocab_size - 1}; set model.vocab_size={self.tokenizer.vocab_size}, or choose the model that fits"
            )

    def load(self) -> dict[str, Dataset[Pair]]:
        if isinstance(self.given[0], Packed):
            return {split: self.mapped(split) for split in SPLITS}
        return {"train": self.stream(), "val": self.read("val"), "test": self.read("test")}

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def mapped(self, split: str) -> BatchedDataset:
        """Return the windows of packed folders; those of training are mixed by weight."""
        folders = [folder for folder in self.given if isinstance(folder, Packed)]
        if self.weights is not None and split == "train":
            return Mixture([self.shards([folder], split) for folder in folders], self.weights)
        return self.shards(folders, split)

    def shards(self, folders: Sequence[Packed], split: str) -> ManyWindows:
        shards = [(folder, shard) for folder in folders for shard in folder.of(split) if shard.tokens > self.context]
        if not shards:
            raise ValueError(self.too_little(folders[0].folder, split))
        return ShardWindows([folder.path(shard) for folder, shard in shards], folders[0].dtype, self.context)

    def stream(self) -> TextStream:
        sources = [splits["train"] for splits in self.given if isinstance(splits, dict)]
        weights = self.weights or [1.0]
        return TextStream(sources, weights, self.reading, self.tokenizer, self.context, self.seed, self.buffer_windows)

    def read(self, split: str) -> BatchedDataset:
        """Return held-out documents, tokenized in memory; files that all sources share are read once."""
        pieces = dict.fromkeys(piece for splits in self.given if isinstance(splits, dict) for piece in splits[split])
        tokens = [with_end(document, self.tokenizer) for piece in pieces for document in documents(piece, self.reading)]
        if sum(map(len, tokens)) <= self.context:
            raise ValueError(self.too_little("data.sources", split))
        return ManyWindows([np.concatenate(tokens)], self.context)

    def too_little(self, name: object, split: str) -> str:
        return (
            f"{name} has too little text: expected a window of {self.context} tokens, and the one after it, for "
            f"{split}; give more text, or a smaller model.context"
        )


def listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def of_split(names: str | Sequence[str], argument: str) -> list[File]:
    return found(listed(names), argument) if names else []


def checked_weights(weights: Sequence[float] | None, names: Sequence[str]) -> list[float] | None:
    if not names:
        raise ValueError("data.sources is empty; give packed folders, paths or globs")
    if weights is None:
        return None
    if len(weights) != len(names) or not all(weight > 0 for weight in weights):
        raise ValueError(
            f"data.weights is {list(weights)} for {len(names)} sources ({', '.join(names)}); expected a number above 0 "
            "for each"
        )
    return list(weights)


def are_packed(names: Sequence[str]) -> bool:
    """Return whether the sources are packed folders. Raises ValueError if only some are, or if one is not finished."""
    folders = [name for name in names if packed.is_packed(name)]
    files = [name for name in names if name not in folders]
    if unpacked := [name for name in files if Path(name).expanduser().is_dir()]:
        raise ValueError(
            f"data.sources: {unpacked[0]} is a folder that was not packed, or not completely; type its pack command "
            f"again, or name its files, as in '{unpacked[0]}/*.txt'"
        )
    if folders and files:
        raise ValueError(
            f"data.sources has both a packed folder, {folders[0]}, and files, {files[0]}; pack the files, too"
        )
    return bool(folders)


def common_tokenizer(
    folders: Sequence[Packed], given: str | None, download: bool, own: Mapping[str, object]
) -> Tokenizer:
    """Return the tokenizer that made all of the folders.

    Raises ValueError if the folders have different tokenizers, if `given` is another one, and if `own` has files for a
    split, because packed folders contain all splits.
    """
    first = folders[0]
    for folder in folders[1:]:
        if (folder.tokenizer, folder.document_end) != (first.tokenizer, first.document_end):
            raise ValueError(
                f"{first.folder} and {folder.folder} were packed with different tokenizers; pack one of them again"
            )
    if given is not None and named(given, download=download).name != first.tokenizer:
        raise ValueError(
            f"{first.folder} was packed with another tokenizer than {given}; leave data.tokenizer out, or pack it "
            f"again with --tokenizer {given}"
        )
    if files := [name for name, value in own.items() if value]:
        raise ValueError(f"data.{files[0]} is for files that are not packed; pass it to the packer, as --{files[0]}")
    return first.open_tokenizer()
