"""The checkout of lightswitch that a fork is made from."""

from __future__ import annotations

import re
import subprocess
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
