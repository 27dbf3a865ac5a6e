"""Make a git repository of one commit: a new project with the package NAME and the engine that trains its models.

python -m lightswitch.fork birdsong ../birdsong
python -m lightswitch.fork birdsong ../birdsong --bare
python -m lightswitch.fork birdsong . --engine=package --engine-from=git+https://host/lightswitch@v0.1.0

INTO is a new or empty folder; `.` turns the checkout itself into the project, on a new branch. The engine is a package
that pip installs from this clone's origin, pinned to this commit, if origin has it; else a folder of the project.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightswitch.errors import Command, Refused
from lightswitch.fork import engine, repository, tree

_TAKEN = ("lightswitch", "runs")  # beside the files and folders of the checkout
_IMPORTED_AS = {"hydra-core": "hydra", "pyyaml": "yaml", "scikit-learn": "sklearn", "protobuf": "google"}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; on an error, print one line to stderr and exit with code 2."""
    parser = _parser()
    asked = parser.parse_args(words)
    try:
        _make(asked)
    except (OSError, Refused) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = Command("lightswitch.fork", __doc__)
    parser.add_argument("name", metavar="NAME", help="name of the package in src")
    parser.add_argument("into", metavar="INTO", help="a new folder, or . for the checkout itself")
    parser.add_argument("--bare", action="store_true", help="one small model and dataset in place of the examples")
    parser.add_argument("--engine", choices=("folder", "package"), help="default: package, if origin has this commit")
    parser.add_argument("--engine-from", metavar="FROM", help="version, wheel or git address of the package")
    return parser


def _make(asked: argparse.Namespace) -> None:
    if not asked.name or not asked.into:  # make passes empty strings for arguments that were not typed
        raise Refused("name the package and a new folder, as in make fork NAME=birdsong INTO=../birdsong")
    root, into = repository.root(), Path(asked.into)
    check_name(asked.name, root)
    pin = _pin(asked, root)
    in_place = into.resolve() == root
    if not in_place:
        repository.check_empty(into, root)
    repository.check_clean(root)
    version, commit = repository.version(root), repository.commit(root)
    files = tree.of_fork(root, asked.name, asked.bare, pin)
    if in_place:
        repository.replace(root, asked.name, files)
    else:
        repository.create(into, asked.name, files)
    where = "this folder, on a branch of that name" if in_place else str(into)
    print(f"{asked.name:<10} {where}: {len(files)} files in one commit")
    print(f"engine     {pin or f'src/lightswitch, version {version}, commit {commit[:7]}'}")
    if pin and engine.is_of_this_machine(pin):
        print(
            "           which exists only on this machine; if others work on the fork, use a git address or a version"
        )
    if in_place and (origin := repository.origin(root)):
        print(f"origin     is still {origin}; type git remote set-url origin ADDRESS before you push")
    print(f"train      {'' if in_place else f'cd {shlex.quote(str(into))} && '}make train")
    print("test       make test")


def _pin(asked: argparse.Namespace, root: Path) -> str | None:
    """Return the pip requirement of the engine; None for a folder."""
    if asked.engine_from and asked.engine != "package":
        raise Refused("--engine-from names a package; also type --engine=package")
    if asked.engine == "folder":
        return None
    if not asked.engine_from and (address := repository.published(root)):
        return engine.requirement(f"git+{address}@{repository.commit(root)}")
    return engine.requirement(asked.engine_from) if asked.engine else None


def check_name(name: str, root: Path) -> None:
    """Check that a fork's package may have a name.

    Raises:
        Refused: it is not a valid package name, or is already in use.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise Refused(
            f"{name} is not a valid Python package name; use lower-case letters, digits and _, as in bird_song"
        )
    if name in _TAKEN or name in {path.stem for path in root.iterdir()}:  # such as train.py, which would be imported
        raise Refused(f"{name} is already used in the project; choose another name")
    if name in sys.stdlib_module_names:
        raise Refused(f"{name} is a module of Python's standard library; choose another name")
    if name in _pinned(root) or _is_installed(name, root):
        raise Refused(f"{name} is the name of an installed package; choose another name")


def _pinned(root: Path) -> set[str]:
    """Return the import names of the packages that the project installs, whether installed yet or not."""
    pins = re.findall(r"^([\w.-]+)==", (root / "constraints.txt").read_text(), re.MULTILINE)
    return {_IMPORTED_AS.get(pin.lower(), pin.lower().replace("-", "_")) for pin in pins}


def _is_installed(name: str, root: Path) -> bool:
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder without code is ignored
        return False
    return not Path(found.origin).resolve().is_relative_to(root)


if __name__ == "__main__":
    main()
