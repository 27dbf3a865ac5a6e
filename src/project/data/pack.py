"""Pack text, JSON lines and Parquet files into memory-mapped shards of token ids, for data=text_shards.

python -m project.data.pack packed/books '~/books/*.txt'
python -m project.data.pack packed/web 's3://corpus/*.jsonl.gz' --tokenizer gpt2/tokenizer.json --workers 32
python -m project.data.pack packed/books --verify

After an interruption, the same command continues. The shards do not depend on the number of processes.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from project.data import packed
from project.data.documents import Piece, Reading, cut, documents, split
from project.data.files import File, found
from project.data.packed import MANIFEST, TOKENIZER, Packed, Shard
from project.data.tokenizer import Tokenizer, named, smallest

PROGRESS = "progress.jsonl"  # the request, and below it each finished shard
MOST_SHARDS = 256  # in a folder, about: each is memory-mapped, and a process may have 1,024 files open
LEAST_SHARD_BYTES = 2**20  # of input: smaller ones would take longer to start than to write
WRITTEN_AT_ONCE_TOKENS = 2**20


@dataclass(frozen=True)
class Unit:
    """The input of one shard, which one process writes."""

    name: str
    split: str
    pieces: tuple[Piece, ...]
    size_bytes: int  # of input


@dataclass(frozen=True)
class Request:
    """Files and options, which determine every byte of the result."""

    files: list[File]
    val: list[File]
    test: list[File]
    reading: Reading
    tokenizer: Tokenizer
    held_out_bytes: int

    def digest(self) -> str:
        files = [[astuple(file) for file in files] for files in (self.files, self.val, self.test)]
        what = (files, astuple(self.reading), self.tokenizer.name, self.tokenizer.document_end, self.held_out_bytes)
        return hashlib.sha256(repr(what).encode()).hexdigest()


def main() -> None:
    given = parsed()
    try:
        print(verified(given.folder) if given.verify else pack(given.folder, request(given), given.workers))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenProcessPool:
        print(
            "error: a process was killed, probably for lack of memory; start again with fewer --workers",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped; to continue, type the same command again", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m project.data.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=lambda text: Path(text).expanduser(), help="where to write")
    parser.add_argument("files", nargs="*", help="paths, addresses or globs of text, JSON lines and Parquet files")
    parser.add_argument("--val", nargs="+", default=[], help="files for validation; default: the first documents")
    parser.add_argument("--test", nargs="+", default=[], help="files for the test; default: the documents after those")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a tokenizer.json, or a cached hub repository")
    parser.add_argument("--download", action="store_true", help="download files of the hub that are not in the cache")
    parser.add_argument("--document-end", help="the tokenizer's token that ends a document, if unusual")
    parser.add_argument("--key", default="text", help="key of the text in JSON lines, or its column in Parquet")
    parser.add_argument("--separator", help="text between documents of a file; default: each file is one")
    parser.add_argument("--held-out-bytes", type=int, default=2**18, help="bytes of text for validation and test each")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--verify", action="store_true", help="compare each shard with its checksum")
    given = parser.parse_args()
    if bool(given.files) == given.verify:
        parser.error("give either files to pack or --verify")
    return given


def request(given: argparse.Namespace) -> Request:
    val, test = (
        found(patterns, name) if patterns else [] for patterns, name in ((given.val, "--val"), (given.test, "--test"))
    )
    tokenizer = named(given.tokenizer, given.document_end, "--tokenizer", given.download, "--download")
    reading = Reading.typed(given.key, given.separator)
    return Request(found(given.files, "files"), val, test, reading, tokenizer, given.held_out_bytes)


def verified(folder: Path) -> str:
    """Compare a folder's shards with their checksums, and return a summary. Raises ValueError for a damaged shard."""
    if not packed.is_packed(str(folder)):
        raise ValueError(f"{folder} has no {MANIFEST}; it is not a packed folder, or packing was not finished")
    content = packed.read(folder)
    for shard in tqdm(content.shards, unit="shard", leave=False, disable=None):  # None: shown only on a terminal
        if problem := packed.damage(content, shard):
            raise ValueError(problem)
    return f"{folder}: {len(content.shards)} shards are intact"


def pack(folder: Path, asked: Request, workers: int) -> str:
    """Write the shards of a request, and return a summary of one line.

    Raises ValueError if the folder has other content, or if files can't be read.
    """
    units = units_of(asked)
    written = begin(folder, asked)
    todo = [unit for unit in units if not is_there(folder, asked.tokenizer, written.get(unit.name))]
    with (folder / PROGRESS).open("a") as progress:
        for shard in shards(folder, todo, asked, workers, sum(unit.size_bytes for unit in units)):
            written[shard.name] = shard
            record(progress, asdict(shard))
    result = Packed(
        folder,
        asked.tokenizer.name,
        asked.tokenizer.vocab_size,
        asked.tokenizer.document_end,
        tuple(written[unit.name] for unit in units),
    )
    packed.write(result)
    counts = ", ".join(f"{split} {result.tokens(split):,}" for split in ("train", "val", "test"))
    return f"{folder}: {len(units)} shards of {sum(s.documents for s in result.shards):,} documents; tokens: {counts}"


def units_of(asked: Request) -> list[Unit]:
    """Return the units of a request, which do not depend on the number of processes."""
    splits = split(asked.files, asked.val, asked.test, asked.reading, asked.held_out_bytes)
    sizes = {file.address: file.size_bytes for file in (*asked.files, *asked.val, *asked.test)}
    most_bytes = max(LEAST_SHARD_BYTES, sum(sizes.values()) // MOST_SHARDS)
    return [unit for name, pieces in splits.items() for unit in grouped(name, pieces, sizes, asked.reading, most_bytes)]


def grouped(
    name: str, pieces: Iterable[Piece], sizes: dict[str, int], reading: Reading, most_bytes: int
) -> Iterator[Unit]:
    parts = [part for piece in pieces for part in cut(piece, sizes[piece.address], reading, most_bytes)]
    group: list[Piece] = []
    group_bytes = number = 0
    for index, (piece, size_bytes) in enumerate(parts, 1):
        group.append(piece)
        group_bytes += size_bytes
        if group_bytes >= most_bytes or index == len(parts):
            yield Unit(f"{name}_{number:05}.bin", name, tuple(group), group_bytes)
            group, group_bytes, number = [], 0, number + 1


def begin(folder: Path, asked: Request) -> dict[str, Shard]:
    """Create the folder, or return the shards that an earlier start has written.

    Raises ValueError for a folder with other files, or with shards of another request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    progress = folder / PROGRESS
    if not progress.is_file():
        if present := sorted(path.name for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty: it has {', '.join(present[:3])}; name a new folder")
        if asked.tokenizer.file is not None:
            (folder / TOKENIZER).write_bytes(asked.tokenizer.file.read_bytes())
        with progress.open("w") as file:
            record(file, {"request": asked.digest()})
        return {}
    lines = whole_lines(progress)
    if not lines or lines[0] != {"request": asked.digest()}:
        raise ValueError(
            f"{folder} has shards of other files, or of another tokenizer or other options; name a new folder"
        )
    for partial in folder.glob("*.partial"):
        partial.unlink()
    return {str(line["name"]): Shard(**line) for line in lines[1:]}


def whole_lines(progress: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the progress file, and remove a last line that was cut off by a kill of the
    process."""
    content = progress.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        progress.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def is_there(folder: Path, tokenizer: Tokenizer, shard: Shard | None) -> bool:
    size_bytes = np.dtype(smallest(tokenizer.vocab_size)).itemsize
    path = folder / (shard.name if shard else "")
    return shard is not None and path.is_file() and path.stat().st_size == shard.tokens * size_bytes


def record(file: IO[str], line: dict[str, object]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def shards(folder: Path, units: Sequence[Unit], asked: Request, workers: int, all_bytes: int) -> Iterator[Shard]:
    """Yield each shard once it is written, by this process or others, and show a progress bar in bytes of input."""
    done_bytes = all_bytes - sum(unit.size_bytes for unit in units)
    with tqdm(total=all_bytes, initial=done_bytes, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        if workers == 1 or len(units) <= 1:
            for unit in units:
                yield write(folder, unit, asked.reading, asked.tokenizer)
                bar.update(unit.size_bytes)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(units)), context, end_with_parent) as pool:
            tasks = {pool.submit(write, folder, unit, asked.reading, asked.tokenizer): unit for unit in units}
            try:
                for task in as_completed(tasks):
                    yield task.result()
                    bar.update(tasks[task].size_bytes)
            finally:
                pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """End this process when its parent process ends, for whatever reason."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write(folder: Path, unit: Unit, reading: Reading, tokenizer: Tokenizer) -> Shard:
    """Write a shard to a temporary file, and rename it once it is on the disk."""
    digest, counts = hashlib.sha256(), np.zeros(2, np.int64)
    partial = folder / f"{unit.name}.{os.getpid()}.partial"
    with partial.open("wb") as file:
        for ids, number in blocks(unit.pieces, reading, tokenizer):
            content = ids.tobytes()
            file.write(content)
            digest.update(content)
            counts += len(ids), number
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / unit.name)
    return Shard(unit.name, unit.split, int(counts[0]), int(counts[1]), digest.hexdigest())


def blocks(
    pieces: Iterable[Piece], reading: Reading, tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray[tuple[int], np.dtype[np.unsignedinteger]], int]]:
    """Yield arrays of token ids, with an end token after each document, and the number of documents in each array."""
    end = np.array([tokenizer.document_end], smallest(tokenizer.vocab_size))
    gathered: list[np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]] = []
    tokens = 0
    for piece in pieces:
        for document in documents(piece, reading):
            ids = tokenizer.encode(document.text)
            gathered += [ids, end]
            tokens += len(ids) + 1
            if tokens >= WRITTEN_AT_ONCE_TOKENS:
                yield np.concatenate(gathered), len(gathered) // 2
                gathered, tokens = [], 0
    if gathered:
        yield np.concatenate(gathered), len(gathered) // 2


if __name__ == "__main__":
    main()
