"""Tokenizers: bytes, or a tokenizer.json of the `tokenizers` library, on disk or in the hub's cache."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from project.hub import folder_of

# usual names of the token that ends a document
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """Interface of tokenizers; `name` is equal for two that return the same ids: `bytes`, or the SHA-256 of a file."""

    name: str
    vocab_size: int
    document_end: int
    file: Path | None

    def encode(self, text: str) -> NDArray[np.unsignedinteger]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """The bytes of UTF-8: 256 ids, of which 0, a byte that no text contains, ends a document."""

    name = "bytes"
    vocab_size = 256
    document_end = 0
    file: Path | None = None

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class TokenizerFile:
    """A tokenizer.json, read by the library `tokenizers`.

    `document_end` names the token that ends a document, if it is not one of the usual. Raises FileNotFoundError without
    the file, ModuleNotFoundError without the library, and ValueError if the file is not a tokenizer.json, or has no
    token that ends a document.
    """

    def __init__(self, file: Path, document_end: str | None = None) -> None:
        self.file: Path | None = file
        try:
            from tokenizers import Tokenizer as Library
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{file} is read by the package tokenizers, which is not installed; type pip install tokenizers"
            ) from error
        content = read(file)
        try:
            self.library = Library.from_str(content.decode())
        except Exception as error:  # the library raises no other class
            raise ValueError(f"{file}: found an invalid tokenizer.json: {error}") from error
        self.name = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self.library.get_vocab_size()
        self.document_end = self.find_end(document_end)

    def find_end(self, given: str | None) -> int:
        choices = DOCUMENT_ENDS if given is None else (given,)
        ids = [self.library.token_to_id(token) for token in choices]
        if found := [number for number in ids if number is not None]:
            return int(found[0])
        raise ValueError(
            f"{self.file} has no token {' and no '.join(choices)}; set document_end to the token that ends a document"
        )

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        return np.array(self.library.encode(text, add_special_tokens=False).ids, dtype=smallest(self.vocab_size))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.library.decode(list(ids), skip_special_tokens=False)
        return text


def named(
    name: str,
    document_end: str | None = None,
    key: str = "data.tokenizer",
    download: bool = False,
    asking: str = "data.download=true",
) -> Tokenizer:
    """Return a tokenizer by name: `bytes`, the path of a tokenizer.json or of a folder with one, or a hub repository in
    the local cache.

    Raises FileNotFoundError if there is none, and the errors of TokenizerFile.
    """
    if name == Bytes.name:
        return Bytes()
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_file():
        return TokenizerFile(path, document_end)
    if not path.is_dir():
        try:
            path = folder_of(name, key, download, asking)
        except ModuleNotFoundError as error:
            raise FileNotFoundError(
                f"{key}={name}: there is no such folder, and reading from the hub needs a package; type pip install -e "
                "'.[hf]', or give a tokenizer.json"
            ) from error
    return TokenizerFile(path / "tokenizer.json", document_end)


def smallest(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest type that holds every id."""
    return next(kind for kind in (np.uint8, np.uint16, np.uint32) if vocab_size - 1 <= np.iinfo(kind).max)


def read(file: Path) -> bytes:
    if not file.is_file():
        raise FileNotFoundError(
            f"tokenizer: found no file {file}; give bytes, the path of a tokenizer.json, or the name of a repository"
        )
    return file.read_bytes()
