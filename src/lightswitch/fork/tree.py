"""The files of a fork, made from those of the checkout, and the engine's documents in it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from lightswitch.fork import bare as bare_fork
from lightswitch.fork import checkout, engine, text
from lightswitch.fork.repository import File
from lightswitch.fork.text import renamed_path

DOCUMENTS = "docs/lightswitch"
_FIRST, _OF_SITE = "README.md", "docs/index.md"  # the page that lists the others, and one that only includes it
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def of_fork(root: Path, name: str, bare: bool, pin: str | None) -> dict[str, File]:
    """Return the files of a fork by their paths.

    Args:
        root: of the checkout.
        name: of the fork's package.
        bare: with one small model and dataset in place of the examples.
        pin: the engine's requirement; None for its folder.
    """
    template = root / "template"
    taken = _chosen(checkout.tracked(root), _listed(template / "taken.txt"))
    examples = _chosen(taken, _listed(template / "examples.txt"))
    kept = [path for path in taken if not (bare and path in examples)]
    files = _read(root, [path for path in kept if not path.startswith(f"{engine.FOLDER}/")])
    for folder in ("files", "bare") if bare else ("files",):
        inside = [path for path in checkout.tracked(root) if path.startswith(f"template/{folder}/")]
        files |= {path.removeprefix(f"template/{folder}/"): file for path, file in _read(root, inside).items()}
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", Path(root, "conf", "config.yaml").read_text(), re.MULTILINE))
    removed = examples if bare else []
    fork = text.Fork(name, pin, removed, sorted(files), defaults)
    files = {text.renamed_path(path, name): _edited(path, file, fork) for path, file in sorted(files.items())}
    files |= {} if bare else _listing(root, fork, examples, files)
    engine_files = {} if pin else _engine(root)
    pages = documents(root, name, {*files, *engine_files})
    if not pin:
        engine_files |= _manifest(root, engine_files, pages)
    return {**files, **engine_files, **{f"{DOCUMENTS}/{path}": File(content) for path, content in pages.items()}}


def _listing(root: Path, fork: text.Fork, examples: list[str], files: dict[str, File]) -> dict[str, File]:
    """Return the list of examples by which `make bare` knows them again."""
    named = [text.renamed_path(path, fork.name) for path in examples]
    of_bare = [path for path in checkout.tracked(root) if path.startswith("template/bare/")]
    replaced = {}
    for path, file in _read(root, of_bare).items():
        path = path.removeprefix("template/bare/")
        if (place := text.renamed_path(path, fork.name)) in files:
            replaced[place] = (files[place].content, _edited(path, file, fork).content)
    content = bare_fork.manifest({path: files[path].content for path in named}, replaced)
    return {bare_fork.MANIFEST: File(content)}


def _listed(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def _chosen(paths: list[str], listed: list[str]) -> list[str]:
    return [path for path in paths if any(path == one or path.startswith(one.rstrip("/") + "/") for one in listed)]


def _read(root: Path, paths: list[str]) -> dict[str, File]:
    where = {path: root / path for path in paths}
    return {path: File(at.read_bytes(), bool(at.stat().st_mode & 0o100)) for path, at in where.items()}


def _edited(path: str, file: File, fork: text.Fork) -> File:
    try:
        return File(text.edited(path, file.content.decode(), fork).encode(), file.is_executable)
    except UnicodeDecodeError:  # a picture
        return file


def _engine(root: Path) -> dict[str, File]:
    """Return the engine's folder as it is, with the changelog in it."""
    inside = [path for path in checkout.tracked(root) if path.startswith(f"{engine.FOLDER}/")]
    return _read(root, inside)


def _manifest(root: Path, files: dict[str, File], pages: dict[str, bytes]) -> dict[str, File]:
    content = {path.removeprefix(f"{engine.FOLDER}/"): file.content for path, file in files.items()}
    manifest = engine.manifest(content, pages, checkout.version(root), checkout.commit(root))
    return {f"{engine.FOLDER}/{engine.MANIFEST}": File(manifest)}


def documents(root: Path, name: str, there: Collection[str]) -> dict[str, bytes]:
    """Return the documents of a checkout by their paths in FOLDER; a link to what a fork does not have is its text.

    Args:
        name: of the fork's package.
        there: paths of the fork's files.
    """
    tracked = [path for path in checkout.tracked(root) if path.startswith("docs/")]
    pages = [_FIRST, *(path for path in tracked if path != _OF_SITE and not path.endswith(".json"))]
    known = {path: path for path in there} | {path: f"{DOCUMENTS}/{path.removeprefix('docs/')}" for path in pages}
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
