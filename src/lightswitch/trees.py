"""Directories that this project makes, and is therefore allowed to remove with all that is in them."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightswitch.errors import Refused

MARK = ".lightswitch"  # an empty file in each of them


def make_tree(path: Path) -> Path:
    """Make a directory that `remove_tree` will remove, and the parents that it lacks.

    Raises:
        FileExistsError: something stands there already.
        OSError: it can't be made, as on a full disk; nothing is left of it.
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
        Refused: it is a link, the working directory, the home, one of their parents, or holds no mark of ours.
        OSError: a part of it could not be removed.
    """
    if reason := _why_not(path):
        raise Refused(f"{path} is not removed: {reason}; if it is to go, remove it by hand")
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != MARK:
            child.unlink()
    shutil.rmtree(path)  # the mark last: a removal that was killed can be done again


def is_own_tree(path: Path) -> bool:
    """Return whether a path is a directory that `remove_tree` removes."""
    return _why_not(path) is None


def _why_not(path: Path) -> str | None:
    for kept, name in ((Path.cwd(), "the working directory"), (Path("~").expanduser(), "the home directory")):
        if path.resolve() in (kept.resolve(), *kept.resolve().parents):
            return f"it is {name}, or holds it"
    if path.is_symlink():
        return "it is a link"
    if not path.is_dir():
        return "it is no directory"
    if not any(path.iterdir()):  # a process was killed before it had set the mark, or after it had removed it
        return None
    return None if (path / MARK).is_file() else f"it holds no {MARK}, so lightswitch has not made it"
