"""Safe file access: reads of regular files of limited size, writes that follow no link, removal of marked directories.

A pipe in place of a file would block, a device never ends, and a few bytes of YAML can expand to gigabytes. A run
writes only to files of its own directory: a link there may lead anywhere. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch.errors import IrregularFile, Refused, shown

_MOST_BYTES = 32 << 20  # of a JSON file: the index of a model with a hundred thousand tensors takes a third of it
_MOST_YAML_BYTES = 256 << 10  # takes seconds to parse
_LINK = "lightswitch link to "  # begins a file that stands for a symbolic link
_LONGEST_PATH_BYTES = 4096
_UNSYNCED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)  # fsync of a directory; POSIX allows the first
_MOST_LEVELS = 64  # of nested mappings and lists
_LARGEST = 1 << 63  # of an integer
_MOST_INTERPOLATIONS = 32  # of one value: OmegaConf takes milliseconds for each
_KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISLNK: "a link",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_Scanner = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if PyYAML was built with it
Kind = TypeVar("Kind")


def check(path: Path) -> Path:
    """Return the path of a file that can be read to its end.

    Raises:
        IrregularFile: it is a pipe, a device, a socket or a directory.
        OSError: it does not exist, or its status can't be read.
    """
    return _checked(path, path.stat(), "a regular file")


def check_own(path: Path) -> None:
    """Check that a run may write a file: it does not exist, or is a regular file without another name (hard link).

    Raises:
        IrregularFile: it is something else, such as a link that leads out of the run's directory.
    """
    if os.path.lexists(path):
        _check_own(path, path.lstat())


def open_own(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Open a file for writing as `os.open` does, if `check_own` allows it.

    If it is passed to `open` as the opener, later disk errors contain the file's name.

    Raises:
        IrregularFile: `check_own` does not allow it.
        OSError: it can't be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader, a socket
            check_own(Path(path))
        raise
    try:
        _check_own(Path(path), os.fstat(descriptor))
    except IrregularFile:
        os.close(descriptor)
        raise
    return descriptor


def create_text(path: Path, text: str) -> None:
    """Write a new file in place of an existing one: if that is a link, the link's target stays unchanged."""
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it: the file is complete, or the previous one."""
    partial = path.with_name(f"{path.name}.partial")
    create_text(partial, text)
    partial.replace(path)


def make_link(path: Path, target: str) -> None:
    """Make a symbolic link at a free path or, on a file system without them, a small file that `linked` follows.

    Raises:
        OSError: neither can be written.
    """
    try:
        path.symlink_to(target)
    except OSError:
        create_text(path, f"{_LINK}{target}\n")


def linked(path: Path) -> Path:
    """Return the path that a file of `make_link` points to; any other path unchanged."""
    target = _target_of(path)
    return path if target is None else path.resolve().parent / target


def is_link(path: Path) -> bool:
    """Return whether a path is a symbolic link or a file of `make_link`."""
    return path.is_symlink() or _target_of(path) is not None


def _target_of(path: Path) -> str | None:
    try:
        with check(path).open("rb") as file:
            found = file.read(len(_LINK) + _LONGEST_PATH_BYTES)
    except (OSError, IrregularFile):
        return None
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


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_text` does: the file is complete, or the previous one."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_text(path: Path, errors: str = "strict", most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a file.

    Args:
        errors: the error handling of `bytes.decode`.

    Raises:
        OSError: it can't be read.
        ValueError: it is too large, or is not text.
    """
    with check(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path.name} is larger than {most_bytes >> 10} KiB, the limit for such a file")
    return content.decode(errors=errors)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: it can't be read.
        ValueError: it is not JSON, is too large, or is nested too deep.
    """
    return parse_json(read_text(path), path.name)


def parse_json(text: str, name: str) -> Any:
    """Return the value of a JSON text (see `read_json`)."""
    try:
        return _shallow(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_yaml(path: Path, resolve: bool = False) -> Any:
    """Return the value in a YAML file, in plain types.

    Args:
        resolve: resolve interpolations, which may call any registered resolver.

    Raises:
        OSError: it can't be read.
        ValueError: it is not YAML, is too large, is nested too deep, or has aliases, a few of which can expand to
            billions of values.
    """
    text = read_text(path, most_bytes=_MOST_YAML_BYTES)
    try:
        for token in yaml.scan(text, _Scanner):
            if isinstance(token, yaml.AliasToken):
                raise ValueError("it has YAML aliases, which runs never write")
            if isinstance(token, yaml.ScalarToken) and token.value.count("${") > _MOST_INTERPOLATIONS:
                raise ValueError(f"a value has more than {_MOST_INTERPOLATIONS} interpolations")
        return _shallow(OmegaConf.to_container(OmegaConf.create(text), resolve=resolve))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:  # the last for a bare number
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error


def read_record(path: Path, kind: type[Kind]) -> Kind:
    """Return a dataclass instance made from the fields in a JSON file (see `read_json` and `as_record`)."""
    return as_record(read_json(path), kind)


def as_record(found: Any, kind: type[Kind]) -> Kind:
    """Return a dataclass instance made from a mapping.

    Raises:
        ValueError: a field is unknown, missing, or of another type.
    """
    hints = get_type_hints(kind)
    if not isinstance(found, dict) or not all(
        name in hints and _is_a(value, hints[name]) for name, value in found.items()
    ):
        raise ValueError(f"expected the fields of a {kind.__name__}")
    try:
        return kind(**found)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from error


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has a type: a class, a list or a dict of a type, or a union of these."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(item, inner[1]) for item in value.values())
    if type(value) is int:
        return hint in (int, float) and abs(value) < _LARGEST
    return type(value) is hint


def _shallow(value: Any) -> Any:
    """Return a value unchanged, after checking that its mappings and lists are not nested too deep for recursion.

    Raises:
        ValueError: they are.
    """
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise ValueError("it is nested too deep")


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list):
        yield from node


def _check_own(path: Path, found: os.stat_result) -> None:
    _checked(
        path, found, "a regular file with one hard link", "a file with several hard links" if found.st_nlink > 1 else ""
    )


def _checked(path: Path, found: os.stat_result, expected: str, other: str = "") -> Path:
    what = next((name for is_it, name in _KINDS.items() if is_it(found.st_mode)), other)
    if what:
        raise IrregularFile(f"{shown(path)} is {what}, expected {expected}; put a copy there, or remove it")
    return path


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
