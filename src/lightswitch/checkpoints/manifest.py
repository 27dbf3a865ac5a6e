"""SHA256SUMS: the checksums of a checkpoint's files, in the format of `sha256sum -c`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightswitch import regular_files

SUMS = "SHA256SUMS"


class Damaged(ValueError):
    """Damage of a checkpoint's file, or a mismatch between a file and the others."""


def write(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums, given by file name, in the format of `sha256sum -c`."""
    (folder / SUMS).write_text(text(sums))


def text(sums: Mapping[str, str]) -> str:
    """Return the checksums in the format of the file."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read(folder: Path) -> dict[str, str]:
    """Return the checksums in a checkpoint by file name, after checking that the files exist.

    Raises:
        Damaged: there is no SHA256SUMS, or it names a file that is elsewhere or missing.
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
        Damaged: a file has no checksum, can't be read, or differs from its checksum.
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
    """Return whether a name is a plain file name, without a path that leads to another directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def check_file(folder: Path, name: str) -> None:
    """Check that a regular file of this name exists: reading a pipe would block forever.

    Raises:
        Damaged: it is missing, or is not a regular file.
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
