"""Text files as bytes: 256 tokens, no tokenizer."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from project.data.files import File, found
from project.data.loaders import BatchedData, BatchedDataset
from project.data.windows import Windows

Token = TypeVar("Token", bound=np.unsignedinteger)

HELD_OUT_BYTES = 2**18  # at most, for validation and test each: enough for a loss accurate to about 0.01 nats


class TextFiles(BatchedData):
    """Text files as windows of bytes.

    The files are joined in a pseudo-random order that depends only on their names, and the end of the joined text is
    held out. Raises FileNotFoundError for a pattern without a file, ValueError for too little text.

    Args:
        files: a path, a glob (`**` for any depth) or an address that fsspec opens, or a list of them.
        context: length of a window, in tokens.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        context: int,
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, pin_memory)
        self.context = context
        self.files = found([files] if isinstance(files, str) else files, "data.files")
        self.check_length(sum(file.size_bytes for file in self.files))
        self.largest_id: int | None = None  # of the text, after `load`

    def check_length(self, text_bytes: int) -> None:
        if held_out_bytes(text_bytes) <= self.context:
            raise ValueError(
                f"found {text_bytes} bytes of text in {len(self.files)} files; expected at least "
                f"{10 * (self.context + 1)}, because a tenth must hold a window of {self.context} and the byte after "
                "it; give more data.files, or a smaller model.context"
            )

    def load(self) -> dict[str, BatchedDataset]:
        text = np.frombuffer(b"".join(map(text_of, self.files)), dtype=np.uint8)
        self.largest_id = int(text.max())
        return {split: Windows(part, self.context) for split, part in parts(text).items()}

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class PythonSource(TextFiles):
    """The top-level modules of this Python's standard library: about 4.7 MB that every machine has."""

    def __init__(self, context: int, batch_size: int = 64, num_workers: int = 0, pin_memory: bool = False) -> None:
        # Names with a leading underscore are left out: _sysconfigdata_* holds this machine's paths and flags.
        pattern = Path(sysconfig.get_path("stdlib"), "[!_]*.py")
        super().__init__(str(pattern), context, batch_size, num_workers, pin_memory)


def text_of(file: File) -> bytes:
    """Return the bytes of a file. Raises ValueError if a zero is among the first 8,000: as for git, it is not text."""
    content = file.read_bytes()
    if b"\0" in content[:8000]:
        raise ValueError(f"{file.address} is not a text file: found a zero byte; leave it out of data.files")
    return content


def held_out_bytes(text_bytes: int) -> int:
    return min(text_bytes // 10, HELD_OUT_BYTES)


def parts(text: NDArray[Token]) -> dict[str, NDArray[Token]]:
    """Split a text, in bytes or other tokens, into contiguous parts that do not overlap."""
    held_out = held_out_bytes(len(text))
    train, val, test = np.split(text, [len(text) - 2 * held_out, len(text) - held_out])
    return {"train": train, "val": val, "test": test}
