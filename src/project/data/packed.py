"""Folders written by `python -m project.data.pack`: shards of token ids and their manifest."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from project.data.tokenizer import Bytes, Tokenizer, named, smallest

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = 1
MEND = "remove that file, and type the same pack command again, which writes what is missing"
BLOCK_BYTES = 2**22  # read at once for a checksum


@dataclass(frozen=True)
class Shard:
    """A file of raw token ids, of one split."""

    name: str
    split: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Packed:
    """A folder of shards; `tokenizer` is the name of the tokenizer that made the ids."""

    folder: Path
    tokenizer: str
    vocab_size: int
    document_end: int
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        return smallest(self.vocab_size)

    def of(self, split: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    def path(self, shard: Shard) -> Path:
        return self.folder / shard.name

    def size_bytes(self, shard: Shard) -> int:
        return shard.tokens * np.dtype(self.dtype).itemsize

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.of(split))

    def open_tokenizer(self) -> Tokenizer:
        return named(self.tokenizer if self.tokenizer == Bytes.name else str(self.folder / TOKENIZER))


def is_packed(address: str) -> bool:
    return (Path(address).expanduser() / MANIFEST).is_file()


def read(folder: Path) -> Packed:
    """Read a manifest, and check the sizes of the shards.

    Raises ValueError for a manifest that can't be read, and for a shard that is missing or has another size.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_text())
        shards = tuple(checked(Shard(**shard)) for shard in content["shards"])
        known = {name: content[name] for name in ("tokenizer", "vocab_size", "document_end")}
        version = content["format"]
        if not all(type(known[name]) is int and 0 <= known[name] < 2**32 for name in ("vocab_size", "document_end")):
            raise ValueError("vocab_size or document_end is not a valid number")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} can't be read ({error!r}); pack into another folder") from error
    if version != FORMAT:
        raise ValueError(f"{file} has format {version}; expected {FORMAT}; pack again into another folder")
    packed = Packed(folder, **known, shards=shards)
    for shard in shards:
        if problem := wrong_size(packed, shard):
            raise ValueError(problem)
    return packed


def checked(shard: Shard) -> Shard:
    """Return a shard. Raises ValueError if its values are impossible, such as a file outside of the folder."""
    if Path(str(shard.name)).name != shard.name or "\0" in shard.name:
        raise ValueError(f"it names a file outside of the folder, {shard.name}")
    if not all(type(count) is int and 0 <= count < 2**60 for count in (shard.tokens, shard.documents)):
        raise ValueError(f"{shard.name} has no valid number of tokens")
    return shard


def write(packed: Packed) -> None:
    content = {
        "format": FORMAT,
        "tokenizer": packed.tokenizer,
        "vocab_size": packed.vocab_size,
        "document_end": packed.document_end,
        "dtype": np.dtype(packed.dtype).name,
        "shards": [asdict(shard) for shard in packed.shards],
    }
    partial = packed.folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(packed.folder / MANIFEST)


def wrong_size(packed: Packed, shard: Shard) -> str | None:
    path, expected_bytes = packed.path(shard), packed.size_bytes(shard)
    found_bytes = path.stat().st_size if path.is_file() else None
    if found_bytes == expected_bytes:
        return None
    found = "is missing" if found_bytes is None else f"has {found_bytes} bytes; expected {expected_bytes}"
    return f"{path} {found}; {MEND}"


def damage(packed: Packed, shard: Shard) -> str | None:
    """Return what is wrong with a shard's size or checksum; None if it is good."""
    if problem := wrong_size(packed, shard):
        return problem
    if sha256(packed.path(shard)) == shard.sha256:
        return None
    return f"{packed.path(shard)} is damaged: its checksum differs from the manifest's; {MEND}"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
