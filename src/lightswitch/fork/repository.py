"""Git repositories: the checkout that a fork is made from, and the fork's own, in one commit."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightswitch.errors import Refused, listed


def root() -> Path:
    """Return the folder of the checkout.

    Raises:
        Refused: this is none: the engine was installed, or is in a fork already.
    """
    found = Path(__file__).resolve().parents[3]
    if not (found / "template").is_dir() or not (found / ".git").exists():
        raise Refused(f"found no checkout of lightswitch in {found}; clone it, and make the project from there")
    return found


def git(root: Path, *arguments: str, given: str | None = None) -> str:
    """Run git in a folder and return what it prints.

    Args:
        given: its standard input.

    Raises:
        Refused: with the first error that git tells, or the last line of what it says.
    """
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], input=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise Refused("found no git; install it") from None
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        at = next((at for at, line in enumerate(told) if line.startswith(("fatal:", "error:"))), len(told) - 1)
        line = (
            " ".join(map(str.strip, told[at : at + 2])) if told[at].endswith(":") else told[at]
        )  # the first of a list
        raise Refused(f"git {arguments[0]}: {line.removeprefix('fatal: ').removeprefix('error: ')}")
    return done.stdout


def check_clean(root: Path) -> None:
    """Check that a fork of the last commit is a fork of what is here, whatever git is told to leave out.

    Raises:
        Refused: something is not committed, or git was told not to look at it.
    """
    listed_by_git = git(root, "ls-files", "-v", "-z").split("\0")
    if unseen := [entry[2:] for entry in listed_by_git if entry and (entry[0] == "S" or entry[0].islower())]:
        back = "git update-index --no-skip-worktree --no-assume-unchanged"
        raise Refused(f"git does not look at {listed(unseen, shown=1)}; type {back} {unseen[0]}, then commit it")
    if changes := git(root, "status", "--porcelain", "--untracked-files=normal").splitlines():
        paths = listed([change[3:] for change in changes], shown=1)
        raise Refused(f"found changes that are not committed: {paths}; commit or stash them")


def check_kept(root: Path) -> None:
    """Check that a branch or a tag keeps the commits that are checked out, once another branch is.

    Raises:
        Refused: HEAD is detached, and none has them.
    """
    if not git(root, "branch", "--show-current").strip() and not git(root, "for-each-ref", "--contains=HEAD").strip():
        raise Refused("found commits that are on no branch; name one for them first: git branch NAME")


def tracked(root: Path) -> list[str]:
    return [path for path in git(root, "ls-files", "-z").split("\0") if path]


def commit(root: Path) -> str:
    return git(root, "rev-parse", "HEAD").strip()


def origin(root: Path) -> str:
    """Return the address of the remote repository `origin`, or nothing without one."""
    return git(root, "remote", "get-url", "origin").strip() if "origin" in git(root, "remote").split() else ""


def commit_at(address: str, ref: str) -> str:
    """Return the commit that a tag, a branch or a commit of a repository is now; of its newest without one.

    Raises:
        Refused: it can't be reached, or has none of that name.
    """
    if re.fullmatch(r"[0-9a-f]{40}", ref):
        return ref
    lines = git(Path(), "ls-remote", address).splitlines()  # asked for main, git also gives feature/main
    commits = {name: commit for commit, name in (line.split("\t") for line in lines)}
    tag = f"refs/tags/{ref}"
    for name in (f"{tag}^{{}}", tag, f"refs/heads/{ref}", ref or "HEAD"):  # ^{}: what an annotated tag is of
        if name in commits:
            return commits[name]
    raise Refused(f"found no {ref or 'commit'} in {address}; name a tag, a branch or a commit of 40 digits")


def version(root: Path) -> str:
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


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
