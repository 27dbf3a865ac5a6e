"""Make a git repository of one commit: a new project with the package NAME, which trains with this engine.

python -m lightswitch.fork birdsong ../birdsong
python -m lightswitch.fork birdsong ../birdsong --bare
python -m lightswitch.fork birdsong --since v0.1.0 > template.diff    # what a fork made at v0.1.0 would have now
uvx --from git+https://host/lightswitch lightswitch-fork birdsong birdsong    # without a clone

INTO is a new or empty folder; `.` turns the checkout itself into the project, on a new branch. The engine is a package:
the commit of this checkout, if its origin is on a host and has it; else a wheel that the project brings along.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from lightswitch.errors import Command, Refused, listed

_TEMPLATE = "docs/your-project"  # files of a project that the checkout itself does not use


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; on an error, print one line to stderr and exit with code 2."""
    parser = Command("lightswitch.fork", __doc__)
    parser.add_argument("name", metavar="NAME", help="name of the package in src")
    parser.add_argument("into", metavar="INTO", nargs="?", help="a new folder, or . for the checkout itself")
    parser.add_argument("--bare", action="store_true", help="one small model and dataset in place of the examples")
    parser.add_argument("--engine", metavar="REQUIREMENT", help="pip's, as lightswitch==0.2.0 or lightswitch @ git+URL")
    parser.add_argument("--since", metavar="COMMIT", help="print what changed in a new project since that commit")
    asked = parser.parse_args(words)
    try:
        with tempfile.TemporaryDirectory() as space:
            root = _checkout(Path(space))
            if asked.since:
                _print_changes(asked, root, Path(space))
            else:
                _make(asked, root, Path(space))
    except (OSError, Refused) as error:
        parser.error(str(error))


def _make(asked: argparse.Namespace, root: Path, space: Path) -> None:
    if not asked.name or not asked.into:  # make passes empty strings for arguments that were not typed
        raise Refused("name the package and a new folder, as in make fork NAME=birdsong INTO=../birdsong")
    into = Path(asked.into)
    _check_name(asked.name, root)
    in_place = into.resolve() == root
    is_taken = into.exists() and (not into.is_dir() or any(into.iterdir()))
    if not in_place and (is_taken or into.resolve().is_relative_to(root)):
        found = "not an empty folder" if is_taken else "inside the checkout"
        raise Refused(f"{into} is {found}; name a new one outside, as ../{into.name}, or . for the checkout itself")
    if changes := _git(root, "status", "--porcelain", "--untracked-files=normal").splitlines():
        paths = listed([change[3:] for change in changes], shown=1)
        raise Refused(f"found changes that are not committed: {paths}; commit or stash them")
    commit, address = _git(root, "rev-parse", "HEAD").strip(), _published(root)
    wheel = None
    if not (pin := asked.engine or (f"lightswitch @ git+{address}@{commit}" if address and not in_place else "")):
        pin, wheel = _wheel(root, commit, space)
    folder = space / "project" if in_place else into
    _write(root, folder, asked, {"name": asked.name, "pin": pin, "pages": address or "lightswitch"})
    if wheel is not None:
        (folder / "wheels").mkdir()
        shutil.copy(wheel, folder / "wheels")
    _commit(folder, asked.name)
    if in_place:
        _replace(root, asked.name, folder)
    count = len(_git(folder, "ls-files").splitlines())
    print(f"{asked.name:<10} {'this folder, on a branch of that name' if in_place else into}: {count} files")
    print(f"engine     {pin}")
    print(f"train      {'' if in_place else f'cd {shlex.quote(str(into))} && '}make train")
    print("test       make test")


def _checkout(space: Path) -> Path:
    """Return the checkout that this code belongs to; where pip installed it, a clone of its commit or release.

    Raises:
        Refused: it belongs to neither.
    """
    found = Path(__file__).resolve().parents[2]
    if (found / _TEMPLATE).is_dir() and (found / ".git").exists():
        return found
    installed = distribution("lightswitch")
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    urls = dict(url.split(", ") for url in installed.metadata.get_all("Project-URL", []))
    if "vcs_info" in source:
        address, commit = source["url"], source["vcs_info"]["commit_id"]
    elif "Repository" in urls:  # the wheel of a release, whose workflow has named it
        address, commit = urls["Repository"], f"v{installed.version}"
    else:
        raise Refused("found no checkout of lightswitch; clone it, and make the project from there")
    _git(space, "clone", "--quiet", address, "lightswitch")
    _git(space / "lightswitch", "checkout", "--quiet", commit)
    return space / "lightswitch"


def _check_name(name: str, root: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise Refused(
            f"{name} is not a valid Python package name; use lower-case letters, digits and _, as in bird_song"
        )
    pinned = re.findall(r"^([\w.-]+)==", (root / "constraints.txt").read_text(), re.MULTILINE)
    used = {"lightswitch", "runs", *(path.stem for path in root.iterdir()), *(pin.replace("-", "_") for pin in pinned)}
    if name in used or name in sys.stdlib_module_names:
        raise Refused(f"{name} is the name of a package or file that the project uses; choose another name")


def _published(root: Path) -> str:
    """Return the address from which others can install the current commit; an empty string without one.

    It is `origin`'s, if that is on a host and has the commit, without a user name and a password.
    """
    origin = _git(root, "config", "--default=", "--get", "remote.origin.url").strip()
    address = re.sub(r"^git@([^:/]+):", r"ssh://git@\1/", origin)
    has_it = _git(root, "for-each-ref", "--contains=HEAD", "refs/remotes/origin").strip()
    is_on_host = address.startswith(("https://", "ssh://"))
    return re.sub(r"^https://[^/]*@", "https://", address) if has_it and is_on_host else ""


def _wheel(root: Path, commit: str, space: Path) -> tuple[str, Path]:
    """Return a requirement of the engine of a commit, and its wheel.

    The commit is a local part of its version, which no index has: pip can take the wheel alone.

    Raises:
        Refused: pip can't build it.
    """
    source = space / "engine"
    _git(space, "clone", "--quiet", str(root), str(source))
    settings = source / "pyproject.toml"
    text, version = settings.read_text(), ""
    if found := re.search(r'^version = "(.+)"$', text, re.MULTILINE):
        version = f"{found[1]}+g{commit[:7]}"
        settings.write_text(text.replace(found[0], f'version = "{version}"'))
    python = root / ".venv/bin/python"  # which has setuptools, once make has set it up
    command = [str(python), "--no-build-isolation"] if python.exists() else [sys.executable]
    pip = [command[0], "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(space), *command[1:]]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Refused(f"pip could not build a wheel of the engine: {line}; type make train first")
    (built,) = space.glob("lightswitch-*.whl")
    return f"lightswitch=={version}", built


# The files of a project


def _write(root: Path, folder: Path, asked: argparse.Namespace, words: Mapping[str, str]) -> None:
    """Write the files of a project into a folder.

    Args:
        words: what stands for {{name}}, {{pin}} and {{pages}}.
    """
    taken, examples, words_of_bare = (
        _lines(root / _TEMPLATE / one) for one in ("taken.txt", "examples.txt", "words_of_bare.txt")
    )
    tracked = [path for path in _git(root, "ls-files", "-z").split("\0") if path]
    sources = {
        path: path for path in tracked if path.startswith(taken) and not (asked.bare and path.startswith(examples))
    }
    for own in (f"{_TEMPLATE}/files/", f"{_TEMPLATE}/bare/")[: 1 + asked.bare]:
        sources |= {path.removeprefix(own): path for path in tracked if path.startswith(own)}
    for path, source in sources.items():
        where = folder / re.sub(r"^(src|tests)/project(?=/)", rf"\1/{asked.name}", path)
        where.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / source, where)
        text = where.read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(f"{{{{{word}}}}}", value)
        for line in words_of_bare if asked.bare else ():
            with_examples, _, without = line.partition(" =>")
            text = text.replace(with_examples, without[1:])
        where.write_text(text if path == "pyproject.toml" else _renamed(text, asked.name), encoding="utf-8")


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(line for line in path.read_text().splitlines() if line and not line.startswith("#"))


def _renamed(text: str, name: str) -> str:
    """Return a text in which the package `project` has another name, with its imports in ruff's order by that name."""
    text = re.sub(r"(?<![\w.-])project(?=\.[a-z_])", name, text)
    text = re.sub(r"\b((?:src|tests)[/.])project\b", rf"\1{name}", text)
    text = re.sub(r"\b(from|import) project\b", rf"\1 {name}", text)
    block = rf"(?:^from (?:{name}|lightswitch|tests)[\w.]* import [^(\n]+\n)+"
    return re.sub(block, lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text, flags=re.MULTILINE)


def _commit(folder: Path, name: str) -> None:
    """Make a repository of a folder, with a single commit."""
    _git(folder, "init", "--quiet", "--initial-branch=main")
    _git(folder, "add", "--all", "--force")
    commit = ("commit", "--quiet", "--no-verify", "--message", f"Begin {name}")
    try:
        _git(folder, *commit)
    except Refused:  # git does not know who commits
        _git(folder, "-c", f"user.name={name}", "-c", f"user.email={name}@localhost", *commit)


def _replace(root: Path, name: str, made: Path) -> None:
    """Check a project out on a new branch of the checkout, without history; the previous branch stays as it is.

    Raises:
        Refused: the branch exists, or a file that git ignores is in the way; nothing is changed.
    """
    _git(root, "fetch", "--quiet", "--no-tags", str(made), f"main:{name}")
    try:
        _git(root, "checkout", "--quiet", "--no-overwrite-ignore", name)
    except Refused as refused:
        _git(root, "branch", "--quiet", "--delete", "--force", name)
        raise Refused(f"{refused}; move it elsewhere") from refused


def _print_changes(asked: argparse.Namespace, root: Path, space: Path) -> None:
    """Print the difference between a project made at a commit and one made now, for `git apply -3` in the project.

    Both have the pin of the first: git merges only what begins from a file that the project's history has.
    """
    options = ["--bare"] if asked.bare else []
    since = _git(root, "rev-parse", f"{asked.since}^{{commit}}").strip()
    version = re.findall(r'^version = "(.+)"$', _git(root, "show", f"{since}:pyproject.toml"), re.MULTILINE)[0]
    address = _published(root)
    of_then = f"lightswitch @ git+{address}@{since}" if address else f"lightswitch=={version}+g{since[:7]}"
    for made, commit in (("before", since), ("now", "HEAD")):
        _git(space, "clone", "--quiet", str(root), f"at_{made}")
        _git(space / f"at_{made}", "checkout", "--quiet", _git(root, "rev-parse", commit).strip())
        command = [sys.executable, "-m", "lightswitch.fork", asked.name, str(space / made), *options]
        environment = {**os.environ, "PYTHONPATH": str(space / f"at_{made}/src")}
        done = subprocess.run(
            [*command, f"--engine={asked.engine or of_then}"], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise Refused(f"lightswitch at {commit}: {done.stderr.strip()}")
    _git(space / "now", "fetch", "--quiet", str(space / "before"), "main")
    print(_git(space / "now", "diff", "--binary", "FETCH_HEAD", "HEAD"), end="")


def _git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output.

    Raises:
        Refused: git fails; with its first error.
    """
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        line = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1])
        raise Refused(f"git {arguments[0]}: {line.removeprefix('fatal: ').removeprefix('error: ')}")
    return done.stdout


if __name__ == "__main__":
    main()
