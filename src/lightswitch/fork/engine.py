"""The engine in a fork: a folder with a manifest of what is in it, or a requirement of pip's."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from lightswitch.errors import Refused

FOLDER = "src/lightswitch"
MANIFEST = "engine.json"
CHANGELOG = "CHANGELOG.md"
_NOT_OF_IT = ("__pycache__", ".mypy_cache")


def requirement(source: str | None) -> str:
    """What pip is asked for: by version, by the path of a wheel, or by the address of a git repository.

    Raises:
        Refused: it is none of them.
    """
    if source is None:
        raise Refused("--engine=package needs --engine-from=VERSION, the path of a wheel, or git+https://…@REF")
    if re.fullmatch(r"\d+(\.\w+)+", source):
        return f"lightswitch=={source}"
    if source.endswith(".whl"):
        if not Path(source).is_file():
            raise Refused(f"found no wheel {source}")
        return f"lightswitch @ {Path(source).resolve().as_uri()}"
    if is_git(source):
        return f"lightswitch @ {'' if source.startswith('git+') else 'git+'}{source}"
    raise Refused(f"{source} is no version, no wheel and no git address; use 0.1.0, PATH.whl or git+https://…@REF")


def is_git(source: str) -> bool:
    return source.startswith(("git+", "https://", "http://", "ssh://", "git@", "file://")) or ".git@" in source


def manifest(files: Mapping[str, bytes], version: str, commit: str) -> bytes:
    """Version, commit and the SHA-256 of every file, by its path in the folder."""
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
    return (json.dumps({"version": version, "commit": commit, "files": digests}, indent=1) + "\n").encode()


def read(folder: Path) -> dict[str, bytes]:
    """Every file of the folder but the manifest and what Python and its tools left there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and inside.as_posix() != MANIFEST and not set(_NOT_OF_IT) & set(inside.parts):
            found[inside.as_posix()] = path.read_bytes()
    return found


def changed(folder: Path) -> list[str]:
    """The files that are not as the manifest has them, by their path in the folder."""
    expected = json.loads((folder / MANIFEST).read_text())["files"]
    found = {path: hashlib.sha256(content).hexdigest() for path, content in read(folder).items()}
    return sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
