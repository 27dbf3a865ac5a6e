"""Documents of text files, JSON lines and Parquet files."""

import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO, Any, NamedTuple

from project.data.files import File, opened

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
BLOCK_BYTES = 2**20  # read at once when documents are split at separators


@dataclass(frozen=True)
class Reading:
    """Where documents are in a file: the value at `key` of a JSON line or a Parquet row; in another file, the whole
    file or the text between two `separator`s."""

    key: str = "text"
    separator: str | None = None

    @classmethod
    def typed(cls, key: str, separator: str | None) -> "Reading":
        """Return the reading for arguments from a command line, where \\n stands for a line end and \\t for a tab."""
        if separator == "":
            raise ValueError(r"the separator of documents is empty; give one, as in separator='\n\n'")
        return cls(key, separator and separator.replace(r"\n", "\n").replace(r"\t", "\t"))


@dataclass(frozen=True)
class Piece:
    """A part of a file between document boundaries, in bytes of decompressed content or in rows of Parquet."""

    address: str
    begin: int = 0
    end: int | None = None


class Document(NamedTuple):
    """A text, its beginning in the file, and the beginning of the next document: in bytes, or in rows of Parquet."""

    begin: int
    end: int
    text: str


def documents(piece: Piece, reading: Reading) -> Iterator[Document]:
    """Return an iterator over the documents of a piece in order, without empty ones.

    Raises ValueError, with file and line, for content that is not UTF-8 or JSON, or has no text at the key.
    """
    if is_parquet(piece.address):
        read = parquet_rows(piece, reading.key)
    elif is_json_lines(piece.address):
        read = json_lines(piece, reading.key)
    else:
        read = texts(piece, reading.separator)
    return (document for document in read if document.text)


def texts(piece: Piece, separator: str | None) -> Iterator[Document]:
    for begin, end, found in between(piece, None if separator is None else separator.encode()):
        yield Document(begin, end, decoded(found, piece.address, begin))


def json_lines(piece: Piece, key: str) -> Iterator[Document]:
    for begin, end, line in between(piece, b"\n"):
        text = decoded(line, piece.address, begin)
        if text and not text.isspace():
            yield Document(begin, end, json_text(text, key, piece.address, begin))


def json_text(line: str, key: str, address: str, begin: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{address}, line {line_number(address, begin)}: found invalid JSON ({error.msg}); expected one object "
            "per line, as in {" + f'"{key}": "a document"' + "}"
        ) from error
    if not isinstance(row, dict) or key not in row:
        has = (
            f"an object with {', '.join(row) or 'no keys'}"
            if isinstance(row, dict)
            else f"a value of type {type(row).__name__}"
        )
        raise ValueError(
            f"{address}, line {line_number(address, begin)}: found {has}; expected the text at the key {key}; "
            "set key to another name"
        )
    return checked(row[key], key, f"{address}, line", begin, address)


def parquet_rows(piece: Piece, key: str) -> Iterator[Document]:
    with opened(piece.address, compression=None) as file:
        table = parquet_file(file, piece.address)
        if key not in table.schema_arrow.names:
            raise ValueError(
                f"{piece.address}: found the columns {', '.join(table.schema_arrow.names)}; expected the text in the "
                f"column {key}; set key to another name"
            )
        row, end = 0, table.metadata.num_rows if piece.end is None else piece.end
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row < end and row + rows > piece.begin:
                values = (
                    value
                    for batch in table.iter_batches(1024, row_groups=[group], columns=[key])
                    for value in batch.column(0).to_pylist()
                )
                for number, value in enumerate(values, row):
                    if piece.begin <= number < end:
                        text = checked(value, key, f"{piece.address}, row", number)
                        yield Document(number, number + 1, text)
            row += rows


def parquet_file(file: Any, address: str) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{address} is read by pyarrow, which is not installed; type pip install -e '.[parquet]'"
        ) from error
    try:
        return ParquetFile(file)
    except ArrowInvalid as error:
        raise ValueError(f"{address}: found an invalid Parquet file: {error}") from error


def checked(value: object, key: str, place: str, number: int, lines_of: str | None = None) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        number = number if lines_of is None else line_number(lines_of, number)
        raise ValueError(
            f"{place} {number}: found a value of type {type(value).__name__} at {key}; expected text; "
            "set key to another name"
        )
    return value


def between(piece: Piece, mark: bytes | None) -> Iterator[tuple[int, int, bytes]]:
    """Yield each document's beginning, the beginning of the next one, and its bytes without the mark; without a mark,
    the whole piece is one document."""
    with opened(piece.address) as file:
        file.seek(piece.begin)
        begin, rest = piece.begin, b""
        while block := readable(file, piece.address, bytes_left(piece, begin + len(rest)) if mark else -1):
            *whole, rest = (rest + block).split(mark) if mark else (block,)
            for found in whole:
                end = begin + len(found) + len(mark or b"")
                yield begin, end, found
                begin = end
        if rest:
            yield begin, begin + len(rest), rest


def readable(file: IO[bytes], address: str, size: int) -> bytes:
    """Return the next bytes. Raises ValueError, with the address, if the compressed data are truncated or damaged."""
    try:
        return file.read(size)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; errors of a format have no number
            raise
        raise ValueError(
            f"{address}: found a compressed file that is damaged or truncated ({error}); write it again, or leave it "
            "out"
        ) from error


def bytes_left(piece: Piece, at: int) -> int:
    return BLOCK_BYTES if piece.end is None else min(BLOCK_BYTES, piece.end - at)


def decoded(content: bytes, address: str, begin: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = line_number(address, begin + error.start)
        raise ValueError(
            f"{address}, line {line}: found the byte 0x{content[error.start]:02x}, which is not UTF-8; "
            "convert the file to UTF-8, or leave it out"
        ) from error


def line_number(address: str, offset: int) -> int:
    """Return the number, from 1, of the line that contains a byte."""
    line, left = 1, offset
    with opened(address) as file:
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            line, left = line + block.count(b"\n"), left - len(block)
    return line


def is_parquet(address: str) -> bool:
    return address.endswith((".parquet", ".pq"))


def is_json_lines(address: str) -> bool:
    stem = next((address.removesuffix(end) for end in COMPRESSED if address.endswith(end)), address)
    return stem.endswith(JSON_LINES)


def split(
    files: list[File], val: list[File], test: list[File], reading: Reading, held_out_bytes: int
) -> dict[str, list[Piece]]:
    """Return the pieces of `train`, `val` and `test`; a split without files takes the first documents of `files`.

    Raises ValueError if a split is empty.
    """
    own = {"val": val, "test": test}
    splits = held_out(files, reading, held_out_bytes, [name for name in own if not own[name]])
    splits |= {name: [Piece(file.address) for file in given] for name, given in own.items() if given}
    if empty := [name for name in ("train", *own) if not splits[name]]:
        raise ValueError(
            f"found too few documents in {listed(files)}: none is left for {' and '.join(empty)}; give more files, "
            "files for val and test, or the separator of the documents in a text file"
        )
    return splits


def listed(files: list[File]) -> str:
    return f"{len(files)} files" if len(files) > 1 else files[0].address


def held_out(files: list[File], reading: Reading, held_out_bytes: int, names: Sequence[str]) -> dict[str, list[Piece]]:
    """Return the pieces of each of `names`, which take the first documents one after another, and of `train`, the rest.

    Each takes documents until they have `held_out_bytes`, or a tenth of the files' bytes if that is less.
    """
    budget = min(held_out_bytes, sum(file.size_bytes for file in files) // 10)
    splits: dict[str, list[Piece]] = {name: [] for name in names}
    left = [Piece(file.address) for file in files]
    for pieces in splits.values():
        taken = 0
        while left and taken < budget:
            piece, read_bytes = beginning(left[0], reading, budget - taken)
            taken += read_bytes
            pieces.append(piece)
            left[:1] = [] if piece.end is None else [replace(left[0], begin=piece.end)]
    return {"train": left, **splits}


def beginning(piece: Piece, reading: Reading, text_bytes: int) -> tuple[Piece, int]:
    """Return the beginning of a piece with at least `text_bytes` of text, or the whole piece, and its bytes of text."""
    taken = 0
    for document in documents(piece, reading):
        taken += len(document.text.encode())
        if taken >= text_bytes and not (is_whole(piece.address, reading)):
            return replace(piece, end=document.end), taken
    return piece, taken


def is_whole(address: str, reading: Reading) -> bool:
    """Return whether a file is a single document."""
    return reading.separator is None and not is_parquet(address) and not is_json_lines(address)


def cut(piece: Piece, size_bytes: int, reading: Reading, most_bytes: int) -> list[tuple[Piece, int]]:
    """Split a piece into parts of about `most_bytes` bytes of its file, and return them with the bytes of each.

    Compressed files and files with a single document are not split.
    """
    if is_parquet(piece.address):
        bounds, sizes = row_groups(piece, most_bytes)
    elif is_whole(piece.address, reading) or piece.address.endswith(COMPRESSED):
        return [(piece, size_bytes)]
    else:
        mark = b"\n" if is_json_lines(piece.address) else (reading.separator or "").encode()
        end = size_bytes if piece.end is None else piece.end
        bounds = [piece.begin, *after_marks(piece, end, mark, most_bytes), end]
        sizes = [after - before for before, after in pairwise(bounds)]
    return [
        (Piece(piece.address, begin, end), size)
        for (begin, end), size in zip(pairwise(bounds), sizes, strict=True)
        if end > begin
    ]


def after_marks(piece: Piece, end: int, mark: bytes, most_bytes: int) -> Iterator[int]:
    """Yield document boundaries, each the first one at least `most_bytes` after the one before."""
    with opened(piece.address) as file:
        at = piece.begin + most_bytes
        while at < end:
            file.seek(at)
            begin, content = at, b""
            while (position := content.find(mark)) < 0 and (block := file.read(BLOCK_BYTES)):
                content += block
            if position < 0 or begin + position + len(mark) >= end:
                return
            at = begin + position + len(mark)
            yield at
            at += most_bytes


def row_groups(piece: Piece, most_bytes: int) -> tuple[list[int], list[int]]:
    """Return the rows at which parts of whole row groups begin and the last one ends, and the bytes of each part."""
    with opened(piece.address, compression=None) as file:
        metadata = parquet_file(file, piece.address).metadata
    bounds, sizes, row = [piece.begin], [0], 0
    last = metadata.num_rows if piece.end is None else piece.end
    for group in range(metadata.num_row_groups):
        row += metadata.row_group(group).num_rows
        if row <= piece.begin:
            continue
        sizes[-1] += metadata.row_group(group).total_byte_size
        if row >= last:
            break
        if sizes[-1] >= most_bytes:
            bounds.append(row)
            sizes.append(0)
    return [*bounds, last], sizes
