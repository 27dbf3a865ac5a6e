"""Files of a run: texts and links that are complete or the previous ones, records, directories that may be removed.

Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch.errors import Refused

_LINK = "lightswitch link to "  # begins a file that stands for a symbolic link
_UNSYNCED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)  # fsync of a directory; POSIX allows the first
Kind = TypeVar("Kind")


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it: the file is complete, or the previous one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_link(path: Path, target: str) -> None:
    """Write a symbolic link, or, on a file system without them, a small file that `linked` follows.

    It replaces an earlier one in one step.

    Raises:
        OSError: neither can be written, or a directory is in the way.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(target)
    except OSError:
        partial.write_text(f"{_LINK}{target}\n")
    partial.replace(path)


def linked(path: Path) -> Path:
    """Return the path that a file of `write_link` points to; any other path unchanged."""
    target = _target_of(path)
    return path if target is None else path.resolve().parent / target


def is_link(path: Path) -> bool:
    """Return whether a path is a symbolic link or a file of `write_link`."""
    return path.is_symlink() or _target_of(path) is not None


def _target_of(path: Path) -> str | None:
    if not path.is_file() or path.stat().st_size > os.pathconf("/", "PC_PATH_MAX"):
        return None
    found = path.read_bytes()
    return os.fsdecode(found[len(_LINK) :]).strip() if found.startswith(_LINK.encode()) else None


def to_disk(path: Path) -> None:
    """Wait until a file or a directory is on the disk; file systems that can't sync a directory keep it anyway."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _UNSYNCED):
            raise
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: it can't be read.
        ValueError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def read_yaml(path: Path, resolve: bool = False) -> Any:
    """Return the value in a YAML file, in plain types.

    Args:
        resolve: resolve interpolations, which may call any registered resolver.

    Raises:
        OSError: it can't be read.
        ValueError: it is not YAML, or has aliases, by which a small file from elsewhere could grow without end.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has YAML aliases, which runs never write")
        return OmegaConf.to_container(OmegaConf.create(text), resolve=resolve)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:  # the last for a bare number
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from error


def read_record(path: Path, kind: type[Kind]) -> Kind:
    """Return a dataclass instance made from the fields in a JSON file (see `read_json` and `as_record`)."""
    return as_record(read_json(path), kind)


def as_record(found: Any, kind: type[Kind]) -> Kind:
    """Return a dataclass instance made from a mapping.

    Raises:
        ValueError: it is no mapping, or a field is unknown or missing.
    """
    try:
        return kind(**found)
    except TypeError as error:
        raise ValueError(f"expected the fields of a {kind.__name__}") from error


MARK = ".lightswitch"  # an empty file in each directory that `make_tree` makes


def make_tree(path: Path) -> Path:
    """Make a directory that `remove_tree` may remove, and its missing parents.

    Raises:
        FileExistsError: the path exists.
        OSError: it can't be made, for example on a full disk; the directory is removed again.
    """
    path.mkdir(parents=True)
    try:
        (path / MARK).touch()
    except OSError:  # a full disk
        path.rmdir()
        raise
    return path


def remove_tree(path: Path) -> None:
    """Remove a directory that `make_tree` has made, or an empty one.

    Raises:
        Refused: it is no directory, a link, the working directory, the home directory, one of their parents, or is not
            empty and has no `MARK`.
        OSError: some of it could not be removed.
    """
    if reason := _why_not(path):
        raise Refused(f"{path} was not removed: {reason}; to delete it, remove it manually")
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != MARK:
            child.unlink()
    shutil.rmtree(path)  # the mark last, so that a killed removal can be repeated


def is_own_tree(path: Path) -> bool:
    """Return whether a path is a directory that `remove_tree` may remove."""
    return _why_not(path) is None


def _why_not(path: Path) -> str | None:
    home = os.path.expanduser("~")  # unchanged for a user without a home
    for kept, name in ((Path.cwd(), "the working directory"), (Path(home), "the home directory")):
        if path.resolve() in (kept.resolve(), *kept.resolve().parents):
            return f"it is {name}, or contains it"
    if path.is_symlink():
        return "it is a link"
    if not path.is_dir():
        return "it is not a directory"
    if not any(path.iterdir()):  # a process was killed before it set the mark, or after it removed it
        return None
    return None if (path / MARK).is_file() else f"it has no {MARK}, so lightswitch did not create it"
