"""The files of a fork on disk, in one commit."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightswitch.errors import Refused
from lightswitch.fork.checkout import check_kept, git


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


def create(into: Path, name: str, files: Mapping[str, File], of: Path | None = None) -> None:
    """Make a repository of one commit that holds the files.

    Args:
        of: the repository whose author it is by; None for its own.
    """
    into.mkdir(parents=True, exist_ok=True)
    git(into, "init", "--quiet", "--initial-branch=main")
    write(into, files)
    git(into, "add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul", given="\0".join(files))
    author = _author(of or into, name)
    git(into, *author, "commit", "--quiet", "--no-verify", "--message", f"Begin {name}")


def replace(root: Path, name: str, files: Mapping[str, File]) -> None:
    """Check the files out on a branch without a past; the one that was checked out stays as it is.

    The commit is made elsewhere, so that git, which checks it out, knows all that it would write over before it does.

    Raises:
        Refused: there is such a branch already, a file in the way, or a commit that no branch has; nothing is changed.
    """
    check_kept(root)
    before = git(root, "ls-files", "-z").split("\0")
    with tempfile.TemporaryDirectory() as space:
        create(Path(space), name, files, of=root)
        git(root, "fetch", "--quiet", "--no-tags", space, f"main:{name}")
    try:
        git(root, "checkout", "--quiet", "--no-overwrite-ignore", name)
    except Refused as refused:
        git(root, "branch", "--quiet", "--delete", "--force", name)
        raise Refused(f"{refused}; move it elsewhere") from refused
    _remove_bytecode(root, {Path(path).parent for path in before if path.endswith(".py")})


def write(root: Path, files: Mapping[str, File]) -> None:
    """Write the files below a folder, by their paths."""
    for path, file in files.items():
        where = root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(file.content)
        where.chmod(0o755 if file.is_executable else 0o644)


def _author(root: Path, name: str) -> list[str]:
    """Return git's options that name the author of a repository; one of that name where git knows none."""
    try:
        found = re.match(r"(.*) <(.*)> ", git(root, "var", "GIT_COMMITTER_IDENT"))
    except Refused:
        found = None
    author, address = found.groups() if found else (name, f"{name}@localhost")
    return ["-c", f"user.name={author}", "-c", f"user.email={address}"]


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
