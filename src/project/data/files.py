"""Files on this machine, or at any address that fsspec opens: s3://, gs://, https://, memory://."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import fsspec


@dataclass(frozen=True)
class File:
    """A file that matches a pattern.

    `version` changes when the file is written again, if its file system reports that.
    """

    address: str
    size_bytes: int
    version: str = ""

    @property
    def name(self) -> str:
        return self.address.rsplit("/", 1)[-1]

    def read_bytes(self) -> bytes:
        with opened(self.address, compression=None) as file:
            content: bytes = file.read()
        return content


def found(patterns: Sequence[str], argument: str) -> list[File]:
    """Return each file once, ordered by a hash of its name, because alphabetical neighbours are often alike.

    `argument` is the user's argument with the patterns, for the error message. Raises FileNotFoundError for a pattern
    that no file matches.
    """
    files: dict[str, File] = {}
    for pattern in patterns:
        matches = matching(pattern)
        if not matches:
            raise FileNotFoundError(
                f"{argument}: no file matches {pattern}; give paths or globs of files, local or at an address "
                f"that fsspec opens, as in '{argument}=[\"~/books/*.txt\"]'"
            )
        files |= {file.address: file for file in matches}
    return sorted(files.values(), key=lambda file: (zlib.crc32(file.name.encode()), file.address))


def matching(pattern: str) -> list[File]:
    """Return the files that match a pattern.

    Raises ValueError for a protocol that fsspec does not know, or whose package is not installed.
    """
    try:
        system, path = fsspec.url_to_fs(pattern)
    except ImportError as error:
        raise ValueError(f"{pattern} can't be opened: {error}") from error
    infos: dict[str, dict[str, Any]] = system.glob(path, detail=True)
    is_local = "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,))
    return [
        File(path if is_local else system.unstrip_protocol(path), info.get("size") or 0, version(info))
        for path, info in infos.items()
        if info["type"] == "file"
    ]


def version(info: dict[str, Any]) -> str:
    return str(next((info[name] for name in ("mtime", "ETag", "etag", "LastModified") if name in info), ""))


def opened(address: str, compression: str | None = "infer") -> IO[bytes]:
    """Open a file for reading, decompressed by its suffix: .gz, .bz2, .xz, and .zst if zstandard is installed."""
    file: IO[bytes] = fsspec.open(address, "rb", compression=compression).open()
    return file
