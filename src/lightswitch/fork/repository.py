"""The files of a fork on disk, in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightswitch.errors import Refused
from lightswitch.fork.checkout import git


@dataclass(frozen=True)
class File:
    """A file to write."""

    content: bytes
    is_executable: bool = False


def check_empty(into: Path, root: Path) -> None:
    """Check that a fork can be made in a folder.

    Raises:
        Refused: it holds files, or lies in the checkout.
    """
    if into.resolve().is_relative_to(root):
        raise Refused(f"{into} lies in the checkout; name a folder beside it, as ../{into.name}, or . for the whole")
    if into.exists() and not into.is_dir():
        raise Refused(f"{into} is a file; name a folder that is not there yet")
    if into.is_dir() and any(into.iterdir()):
        raise Refused(f"{into} is not empty; name a folder that is not there yet")


def create(into: Path, name: str, files: Mapping[str, File]) -> None:
    """Make a repository of one commit that holds the files."""
    into.mkdir(parents=True, exist_ok=True)
    git(into, "init", "--quiet", "--initial-branch=main")
    _commit(into, name, files)


def replace(root: Path, name: str, files: Mapping[str, File]) -> None:
    """Commit the files on a branch without a past; the one that was checked out stays as it is.

    Raises:
        Refused: there is such a branch already.
    """
    before = git(root, "ls-files", "-z").split("\0")
    git(root, "checkout", "--quiet", "--orphan", name)
    git(root, "rm", "-r", "--quiet", "--force", ".")
    _remove_bytecode(root, {Path(path).parent for path in before if path.endswith(".py")})
    _commit(root, name, files)


def write(root: Path, files: Mapping[str, File]) -> None:
    """Write the files below a folder, by their paths."""
    for path, file in files.items():
        where = root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(file.content)
        where.chmod(0o755 if file.is_executable else 0o644)


def _commit(root: Path, name: str, files: Mapping[str, File]) -> None:
    write(root, files)
    git(root, "add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul", given="\0".join(files))
    git(root, *_identity(root, name), "commit", "--quiet", "--no-verify", "--message", f"Begin {name}")


def _identity(root: Path, name: str) -> list[str]:
    """Return git's options that name an author, where it knows none."""
    try:
        git(root, "var", "GIT_COMMITTER_IDENT")
    except Refused:
        return ["-c", f"user.name={name}", "-c", f"user.email={name}@localhost"]
    return []


def _remove_bytecode(root: Path, folders: set[Path]) -> None:
    """Remove what Python compiled, which would keep folders alive whose code is gone."""
    for folder in sorted(folders, reverse=True):
        cache = root / folder / "__pycache__"
        for compiled in cache.glob("*.pyc"):
            compiled.unlink()
        for path in (cache, root / folder, *(root / folder).parents):
            if path == root or not path.is_dir() or any(path.iterdir()):
                continue
            path.rmdir()
