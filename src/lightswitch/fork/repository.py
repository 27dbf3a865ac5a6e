"""Git operations on the checkout that a fork is made from, and on the fork's repository of one commit."""

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
        Refused: there is no checkout: the engine is an installed package, or part of a fork.
    """
    found = Path(__file__).resolve().parents[3]
    if not (found / "template").is_dir() or not (found / ".git").exists():
        raise Refused(f"found no checkout of lightswitch in {found}; clone it, and make the project from there")
    return found


def git(root: Path, *arguments: str, given: str | None = None) -> str:
    """Run git in a folder and return its output.

    Args:
        given: text for its standard input.

    Raises:
        Refused: git is missing, or fails; with its first error, or the last line of its output.
    """
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], input=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise Refused("found no git; install it") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        at = next((at for at, line in enumerate(lines) if line.startswith(("fatal:", "error:"))), len(lines) - 1)
        line = (
            " ".join(map(str.strip, lines[at : at + 2])) if lines[at].endswith(":") else lines[at]
        )  # with the first entry of a list
        raise Refused(f"git {arguments[0]}: {line.removeprefix('fatal: ').removeprefix('error: ')}")
    return done.stdout


def check_clean(root: Path) -> None:
    """Check that the working tree equals the last commit, including files that git status does not compare.

    Raises:
        Refused: a change is not committed, or git was told to ignore changes of a file.
    """
    listed_by_git = git(root, "ls-files", "-v", "-z").split("\0")
    if unseen := [entry[2:] for entry in listed_by_git if entry and (entry[0] == "S" or entry[0].islower())]:
        back = "git update-index --no-skip-worktree --no-assume-unchanged"
        raise Refused(f"git ignores changes to {listed(unseen, shown=1)}; type {back} {unseen[0]}, then commit it")
    if changes := git(root, "status", "--porcelain", "--untracked-files=normal").splitlines():
        paths = listed([change[3:] for change in changes], shown=1)
        raise Refused(f"found changes that are not committed: {paths}; commit or stash them")


def check_kept(root: Path) -> None:
    """Check that a branch or a tag contains the current commit, so that it stays reachable from there.

    Raises:
        Refused: HEAD is detached, and no branch or tag contains it.
    """
    if not git(root, "branch", "--show-current").strip() and not git(root, "for-each-ref", "--contains=HEAD").strip():
        raise Refused("found commits that are on no branch; create a branch for them first: git branch NAME")


def tracked(root: Path) -> list[str]:
    return [path for path in git(root, "ls-files", "-z").split("\0") if path]


def commit(root: Path) -> str:
    return git(root, "rev-parse", "HEAD").strip()


def origin(root: Path) -> str:
    """Return the address of the remote repository `origin`, or an empty string without one."""
    return git(root, "remote", "get-url", "origin").strip() if "origin" in git(root, "remote").split() else ""


def published(root: Path) -> str:
    """Return the address from which others can install the current commit; an empty string without one.

    It is `origin`'s, if that is on a host and has the commit, without a user name and a password.
    """
    address = re.sub(r"^git@([^:/]+):", r"ssh://git@\1/", origin(root))
    if not address.startswith(("https://", "ssh://")):
        return ""
    has_it = git(root, "for-each-ref", "--contains=HEAD", "refs/remotes/origin").strip()
    return re.sub(r"^https://[^/]*@", "https://", address) if has_it else ""


def commit_at(address: str, ref: str) -> str:
    """Return the commit hash of a tag, a branch or a commit in a repository; of its HEAD if `ref` is empty.

    Raises:
        Refused: the repository can't be reached, or has no such tag, branch or commit.
    """
    if re.fullmatch(r"[0-9a-f]{40}", ref):
        return ref
    lines = git(Path(), "ls-remote", address).splitlines()  # given main, git would also list feature/main
    commits = {name: commit for commit, name in (line.split("\t") for line in lines)}
    tag = f"refs/tags/{ref}"
    for name in (f"{tag}^{{}}", tag, f"refs/heads/{ref}", ref or "HEAD"):  # ^{}: the commit of an annotated tag
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
        Refused: it is not empty, is a file, or is inside the checkout.
    """
    if into.resolve().is_relative_to(root):
        raise Refused(
            f"{into} is inside the checkout; name a folder outside of it, such as ../{into.name}, or . for the "
            "checkout itself"
        )
    if into.exists() and not into.is_dir():
        raise Refused(f"{into} is a file; name a new folder")
    if into.is_dir() and any(into.iterdir()):
        raise Refused(f"{into} is not empty; name a new folder")


def create(into: Path, name: str, files: Mapping[str, File], of: Path | None = None) -> None:
    """Make a repository with the files in a single commit.

    Args:
        of: the repository whose author the commit gets; None for the new one.
    """
    into.mkdir(parents=True, exist_ok=True)
    git(into, "init", "--quiet", "--initial-branch=main")
    write(into, files)
    git(into, "add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul", given="\0".join(files))
    author = _author(of or into, name)
    git(into, *author, "commit", "--quiet", "--no-verify", "--message", f"Begin {name}")


def replace(root: Path, name: str, files: Mapping[str, File]) -> None:
    """Check the files out on a new branch without history; the previous branch stays unchanged.

    The commit is made in a temporary repository, so that git knows every file that the checkout would overwrite in
    advance.

    Raises:
        Refused: the branch already exists, a file is in the way, or no branch has the current commit; nothing is
            changed.
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
    """Return git options with the author configured for a repository, or with `name` if none is configured."""
    try:
        found = re.match(r"(.*) <(.*)> ", git(root, "var", "GIT_COMMITTER_IDENT"))
    except Refused:
        found = None
    author, address = found.groups() if found else (name, f"{name}@localhost")
    return ["-c", f"user.name={author}", "-c", f"user.email={address}"]


def _remove_bytecode(root: Path, folders: set[Path]) -> None:
    """Remove compiled Python files, and the folders that are then empty because their code was removed."""
    for folder in sorted(folders, reverse=True):
        cache = root / folder / "__pycache__"
        for compiled in cache.glob("*.pyc"):
            compiled.unlink()
        for path in (cache, root / folder, *(root / folder).parents):
            if path == root or not path.is_dir() or any(path.iterdir()):
                continue
            path.rmdir()
