"""Conversations in JSON lines, as token ids of a chat template, with a loss on the answers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from project.data.files import File, found
from project.data.loaders import BatchedData, BatchedDataset, Pair
from project.hub import folder_of, read_tokenizer, require

IGNORED = -100  # target of a token without a loss
Conversation = tuple[NDArray[np.int64], NDArray[np.int64]]  # token ids, and targets of the same length


class Chat(BatchedData):
    """Conversations of JSON lines, {"messages": [{"role": "user", "content": "…"}, …]}, each line one of them.

    A sample is one conversation, padded, or with `packing` several in a row, as many as fit. Each is cut at the
    context. A tenth of the conversations is held out for validation and test each.

    Args:
        files: a path, a glob or an address that fsspec opens, or a list of them.
        context: length of a sample, in tokens.
        tokenizer: a folder, or the name of a hub repository in the local cache, with a chat template.
        packing: several conversations in a sample; a token then also attends to the conversations before its own.
        key: key of the messages.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: files, the tokenizer, its template or a package are missing.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        context: int,
        tokenizer: str | None,
        packing: bool = False,
        key: str = "messages",
        download: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.files = found([files] if isinstance(files, str) else files, "data.files")
        self.context, self.packing, self.key = context, packing, key
        require("transformers")
        if tokenizer is None:
            raise ValueError("tokenizer: none is set; type data.tokenizer=FOLDER, or the name of a hub repository")
        self.tokenizer = read_tokenizer(folder_of(tokenizer, "data.tokenizer", download))
        if self.tokenizer.chat_template is None:
            raise ValueError(f"data.tokenizer={tokenizer} has no chat template; name the tokenizer of a chat model")

    def load(self) -> dict[str, BatchedDataset]:
        found = [self.tokens(messages) for file in self.files for messages in self.conversations(file)]
        kept = [one for one in found if (one[1] != IGNORED).any()]
        held_out = len(kept) // 10
        if held_out < 1:
            raise ValueError(
                f"data.files have {len(kept)} conversations with an answer within {self.context} tokens; expected 10"
            )
        parts = {"train": kept[2 * held_out :], "val": kept[:held_out], "test": kept[held_out : 2 * held_out]}
        return {split: Conversations(part, self.context, self.packing) for split, part in parts.items()}

    def conversations(self, file: File) -> Iterator[list[dict[str, str]]]:
        for number, line in enumerate(file.read_bytes().decode().split("\n"), start=1):
            try:
                if line.strip():
                    messages = json.loads(line)[self.key]
                    yield [{"role": one["role"], "content": one["content"]} for one in messages]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file.address}, line {number}: {error!r}; expected an object with {self.key}, a list of objects "
                    "with role and content"
                ) from error

    def tokens(self, messages: list[dict[str, str]]) -> Conversation:
        """Return a conversation whose targets are the tokens of its answers, and IGNORED elsewhere."""
        ids, trains = list[int](), list[bool]()
        for number, message in enumerate(messages, start=1):
            if message["role"] == "assistant":
                asked = self.templated(messages[: number - 1], add_generation_prompt=True)
                answered = self.templated(messages[:number])
                if answered[: len(asked)] != asked or asked[: len(ids)] != ids:
                    raise ValueError(
                        "data.tokenizer: its chat template changes earlier messages; name a tokenizer whose template "
                        "only appends"
                    )
                trains += [False] * (len(asked) - len(ids)) + [True] * (len(answered) - len(asked))
                ids = answered
        whole = np.array(ids[: self.context + 1], dtype=np.int64)
        targets = np.where(trains[: self.context + 1], whole, IGNORED)
        return whole[:-1], targets[1:]

    def templated(self, messages: list[dict[str, str]], **options: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text


class Conversations(BatchedDataset):
    """Samples of `context` tokens: a conversation each, or as many as fit in a row; the rest is padding."""

    def __init__(self, conversations: Sequence[Conversation], context: int, packing: bool) -> None:
        self.context = context
        self.samples: list[list[Conversation]] = []
        room = 0
        for one in conversations:
            if not packing or len(one[0]) > room:
                self.samples.append([])
                room = context
            self.samples[-1].append(one)
            room -= len(one[0])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        ids = np.zeros((len(indices), self.context), dtype=np.int64)
        targets = np.full_like(ids, IGNORED)
        for row, index in enumerate(indices):
            begin = 0
            for own, wanted in self.samples[index]:
                end = begin + len(own)
                ids[row, begin:end], targets[row, begin:end] = own, wanted
                begin = end
        return torch.from_numpy(ids), torch.from_numpy(targets)
