"""The engine's documents in a fork: docs/lightswitch, at the engine's version, with links to what is there."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from lightswitch.fork import checkout
from lightswitch.fork.text import renamed_path

FOLDER = "docs/lightswitch"
_FIRST, _OF_SITE = "README.md", "docs/index.md"  # the page that lists the others, and one that only includes it
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def of(root: Path, name: str, there: Collection[str]) -> dict[str, bytes]:
    """Return the documents of a checkout by their paths in FOLDER; a link to what a fork does not have is its text.

    Args:
        name: of the fork's package.
        there: paths of the fork's files.
    """
    tracked = [path for path in checkout.tracked(root) if path.startswith("docs/")]
    pages = [_FIRST, *(path for path in tracked if path != _OF_SITE and not path.endswith(".json"))]
    known = {path: path for path in there} | {path: f"{FOLDER}/{path.removeprefix('docs/')}" for path in pages}
    contents = {path: (root / path).read_bytes() for path in pages}
    return {
        path.removeprefix("docs/"): _linked(path, content.decode(), known, name).encode()
        if path.endswith(".md")
        else content
        for path, content in contents.items()
    }


def _linked(page: str, text: str, known: dict[str, str], name: str) -> str:
    """Return the text of a page with its links as they are from its place in a fork.

    Args:
        page: its path in the checkout.
        known: the path in the fork of each file that is there, by that in the checkout.
    """

    folders = {str(parent) for one in known.values() for parent in PurePosixPath(one).parents}

    def link(found: re.Match[str]) -> str:
        words, target, part = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = renamed_path(os.path.normpath(PurePosixPath(page).parent / target), name)
        if (place := known.get(path, path if path in folders and not path.startswith("docs") else None)) is None:
            return words
        return f"[{words}]({os.path.relpath(place, PurePosixPath(known[page]).parent)}{part})"

    return _LINK.sub(link, text)
