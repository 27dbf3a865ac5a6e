"""The engine in a fork: a folder with a manifest of its files, or a pip requirement."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from lightswitch.errors import Refused
from lightswitch.fork import repository

FOLDER = "src/lightswitch"
MANIFEST = "engine.json"
CHANGELOG = "CHANGELOG.md"
_NOT_OF_IT = ("__pycache__", ".mypy_cache")


def requirement(source: str | None) -> str:
    """Return the pip requirement of a version, a wheel, or a git address, whose REF is pinned to its current commit.

    Raises:
        Refused: it is none of these, the wheel does not exist, or git finds no such commit.
    """
    if source is None:
        raise Refused(
            "--engine=package: origin does not have this commit; push it, or type --engine-from=VERSION, the path of a "
            "wheel, or git+https://…@REF"
        )
    if re.fullmatch(r"\d+(\.\w+)+", source):
        return f"lightswitch=={source}"
    if source.endswith(".whl"):
        if not Path(source).is_file():
            raise Refused(f"found no wheel {source}")
        return f"lightswitch @ {Path(source).resolve().as_uri()}"
    if is_git(source):
        address, ref = split_git(source)
        return f"lightswitch @ git+{address}@{repository.commit_at(address, ref)}"
    raise Refused(f"{source} is not a version, a wheel or a git address; use 0.1.0, PATH.whl or git+https://…@REF")


def is_git(source: str) -> bool:
    return source.startswith(("git+", "https://", "http://", "ssh://", "git@", "file://")) or ".git@" in source


def split_git(source: str) -> tuple[str, str]:
    """Return the address of a repository, and the tag, branch or commit after its last `@`, or an empty string."""
    address, at, ref = source.removeprefix("git+").rpartition("@")
    if not at or "/" not in address:  # an @ of the address, as in git@host:path
        return source.removeprefix("git+"), ""
    return address, ref


def is_of_this_machine(pin: str) -> bool:
    """Return whether a requirement is a path on this machine."""
    return re.match(r"lightswitch @ (git\+)?file:", pin) is not None


def manifest(files: Mapping[str, bytes], pages: Mapping[str, bytes], version: str, commit: str) -> bytes:
    """Return the engine's manifest: version, commit, and the SHA-256 of every file by its path in the folder.

    Args:
        pages: contents of the documents, by path in their folder.
    """
    found = {"version": version, "commit": commit, "files": digests(files), "docs": digests(pages)}
    return (json.dumps(found, indent=1) + "\n").encode()


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file's content, by path."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}


def read(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by path, without the manifest and the caches of Python tools."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and inside.as_posix() != MANIFEST and not set(_NOT_OF_IT) & set(inside.parts):
            found[inside.as_posix()] = path.read_bytes()
    return found


def changed(folder: Path) -> list[str]:
    """Return the paths of the files in the folder that differ from the manifest, including new and missing files."""
    expected = named_in_manifest(folder)
    found = digests(read(folder))
    return sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))


def named_in_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in the manifest, by its path in the folder."""
    files: dict[str, str] = json.loads((folder / MANIFEST).read_text())["files"]
    return files
