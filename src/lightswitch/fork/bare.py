"""Remove the examples that came with a fork, and no file of your own.

python -m lightswitch.fork.bare

Examples that you have changed, or that your own files need, stay. First replace the defaults in conf/config.yaml that
are examples.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lightswitch.errors import Command, Refused, listed
from lightswitch.fork import engine

MANIFEST = ".examples.json"
_READ = (".py", ".yaml")  # suffixes of files that may refer to others


def main() -> None:
    """Run the command; on an error, print one line to stderr and exit with code 2."""
    parser = Command("lightswitch.fork.bare", __doc__)
    parser.parse_args()
    try:
        for message in remove(Path.cwd()):
            print(message)
    except (OSError, Refused) as error:
        parser.error(str(error))


def manifest(examples: Mapping[str, bytes], replaced: Mapping[str, tuple[bytes, bytes]]) -> bytes:
    """Return the manifest of the examples in a fork, and of the files that are different in a fork without examples.

    Args:
        examples: contents by path.
        replaced: contents by path, with and without examples.
    """
    found = {
        "files": {path: _digest(content) for path, content in sorted(examples.items())},
        "replaced": {path: [_digest(one), other.decode()] for path, (one, other) in sorted(replaced.items())},
    }
    return (json.dumps(found, indent=1) + "\n").encode()


def remove(fork: Path) -> list[str]:
    """Remove the examples below a folder, and return the lines to print.

    Raises:
        Refused: the folder has no list of examples, or a default of config.yaml is an example.
    """
    listing = fork / MANIFEST
    if not listing.is_file():
        raise Refused(f"found no {MANIFEST} in {fork}, which lists the examples that a fork was made with")
    known: dict[str, Any] = json.loads(listing.read_text())
    there = {path: digest for path, digest in known["files"].items() if (fork / path).is_file()}
    going = {path for path, digest in there.items() if _digest((fork / path).read_bytes()) == digest}
    _check_defaults(fork, going)
    without = {
        path: text
        for path, (digest, text) in known["replaced"].items()
        if (fork / path).is_file() and _digest((fork / path).read_bytes()) == digest
    }
    stays = {path: "it was changed here" for path in there if path not in going}
    stays |= _needed(fork, going, without)
    for path in going - stays.keys():
        (fork / path).unlink()
        _remove_empty(fork, (fork / path).parent)
    for path, text in without.items():
        (fork / path).write_text(text)
    if stays:
        known["files"] = {path: digest for path, digest in there.items() if path in stays}
        listing.write_text(json.dumps(known, indent=1) + "\n")
    else:
        listing.unlink()
    lines = [f"stays      {path}: {why}" for path, why in sorted(stays.items())]
    return [
        f"removed    {len(going - stays.keys())} files of the examples",
        *lines,
        "next       git add --all, and commit",
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_defaults(fork: Path, going: Iterable[str]) -> None:
    config = (fork / "conf" / "config.yaml").read_text()
    defaults = re.findall(r"^  - (\w+): (\w+)$", config, re.MULTILINE)
    examples = [
        f"{group}: {choice}"
        for group, choice in defaults
        if PurePosixPath("conf", group, f"{choice}.yaml").as_posix() in going
    ]
    if examples:
        raise Refused(
            f"config.yaml has the defaults {listed(examples)}, which are examples; replace them with your own first"
        )


def _needed(fork: Path, going: Iterable[str], without: Mapping[str, str]) -> dict[str, str]:
    """Return the examples that the remaining files refer to, directly or through other examples, each with the
    reason."""
    texts = {path: without.get(path) or (fork / path).read_text(errors="replace") for path in _files(fork)}
    left, needed = set(going), dict[str, str]()
    while True:
        own = {path: text for path, text in texts.items() if path not in left}
        found = {
            path: f"{other} needs it"
            for path in sorted(left)
            for other, text in own.items()
            if re.search(_named(path, other), text, re.MULTILINE)
        }
        if not found:
            return needed
        needed |= found
        left -= found.keys()


def _files(fork: Path) -> list[str]:
    found = (path for top in ("conf", "src", "tests") for path in sorted((fork / top).rglob("*")))
    paths = [path.relative_to(fork).as_posix() for path in found if path.suffix in _READ and path.is_file()]
    return [path for path in paths if not path.startswith(f"{engine.FOLDER}/")]


def _named(path: str, other: str) -> str:
    """Return a pattern that finds references to an example in another file: to a choice of conf, or to a module."""
    place = PurePosixPath(path)
    near = place.parent == PurePosixPath(other).parent
    if place.suffix == ".yaml":
        choice = rf"^\s*-\s*(?:override\s+)?/?{place.parent.name}(?:@\w+)?:\s*{place.stem}\s*(?:#.*)?$"
        return rf"{choice}|^\s*-\s*{place.stem}\s*(?:#.*)?$|^defaults: \[[^\]]*\b{place.stem}\b" if near else choice
    module = ".".join((place if place.stem != "__init__" else place.parent).with_suffix("").parts).removeprefix("src.")
    parent, _, name = module.rpartition(".")
    pattern = rf"\b{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b"
    return rf"{pattern}|from \.{name} |from \. import [^\n]*\b{name}\b" if near else pattern


def _remove_empty(fork: Path, folder: Path) -> None:
    """Remove a folder and its parents while they are empty except for compiled Python files."""
    while folder != fork and all(path.name == "__pycache__" for path in folder.iterdir()):
        for compiled in folder.rglob("*.pyc"):
            compiled.unlink()
        for path in (*folder.iterdir(), folder):
            path.rmdir()
        folder = folder.parent


if __name__ == "__main__":
    main()
