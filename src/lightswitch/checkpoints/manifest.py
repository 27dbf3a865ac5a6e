"""SHA256SUMS: the checksums of a checkpoint's files, as `sha256sum -c` reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightswitch import regular_files

SUMS = "SHA256SUMS"


class Damaged(ValueError):
    """Error that says what is wrong with a file of a checkpoint, or that it does not fit the files beside it."""


def write(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums, by the names of files, as `sha256sum -c` reads them."""
    (folder / SUMS).write_text(text(sums))


def text(sums: Mapping[str, str]) -> str:
    """Return the checksums as they are written."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read(folder: Path) -> dict[str, str]:
    """Return the checksums in a checkpoint by the names of files, each of which exists.

    Raises:
        Damaged: there is no list, or it names a file that lies elsewhere or is missing.
    """
    try:
        check_file(folder, SUMS)
        lines = [line.split("  ") for line in regular_files.read_text(folder / SUMS).splitlines()]
        sums = {name: digest for digest, name in lines}
    except OSError as error:
        raise Damaged(f"{SUMS} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(f"it has no {SUMS}, or a damaged one") from error
    for name in sums:
        if not is_plain_name(name):
            raise Damaged(f"{SUMS} names a file outside of the checkpoint: {name}")
        check_file(folder, name)
    return sums


def compare(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Compare some files of a checkpoint with their checksums.

    Raises:
        Damaged: a file has no checksum, can't be read, or differs from it.
    """
    for name in names:
        if name not in sums:
            raise Damaged(f"{SUMS} has no checksum of {name}")
        try:
            found = of_file(folder / name)
        except OSError as error:
            raise Damaged(f"{name} can't be read: {error.strerror}") from error
        if found != sums[name]:
            raise Damaged(f"{name} differs from its checksum")


def is_plain_name(name: Any) -> bool:
    """Return whether a name is that of a file in a directory itself, not of one elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def check_file(folder: Path, name: str) -> None:
    """Check that a regular file of this name exists: reading a pipe would wait for ever.

    Raises:
        Damaged: it is missing, or something else.
    """
    if not (folder / name).exists():
        raise Damaged(f"{name} is missing")
    if not (folder / name).is_file():
        raise Damaged(f"{name} is not a regular file")


def of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
