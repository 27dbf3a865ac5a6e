"""Replace the engine of a fork by another version, and print what is new in it and what the fork must change.

python -m lightswitch.fork.update ../lightswitch                          # a checkout
python -m lightswitch.fork.update git+https://host/lightswitch@v0.2.0     # a git address, at a tag, branch or commit
python -m lightswitch.fork.update lightswitch-0.2.0-py3-none-any.whl      # a wheel; for a package, also a version

An engine in the folder src/lightswitch is replaced as a whole, unless it was changed here. For an engine that is a
package, its requirement in pyproject.toml is replaced and installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from lightswitch.errors import Command, Refused, listed
from lightswitch.fork import engine, repository, tree
from lightswitch.fork.repository import File, write
from lightswitch.fork.tree import with_pin
from lightswitch.regular_files import make_tree, remove_tree

_BESIDE = ("cloud", "conf", "slurm", "Makefile", "train.py")  # copied into a fork once; the fork owns them


def main() -> None:
    """Run the command; on an error, print one line to stderr and exit with code 2."""
    parser = Command("lightswitch.fork.update", __doc__)
    parser.add_argument("new", nargs="?", metavar="FROM", help="a checkout, a git address, a wheel or a version")
    new = parser.parse_args().new
    if not new:  # make passes an empty string if it was not typed
        parser.error("name the new engine: make update-engine FROM=PATH, a wheel, or git+https://…@REF")
    try:
        _update(new, Path.cwd())
    except (OSError, Refused, zipfile.BadZipFile) as error:
        parser.error(str(error))


def _update(given: str, fork: Path) -> None:
    folder, pyproject = fork / engine.FOLDER, fork / "pyproject.toml"
    for replaced in (folder, fork / tree.DOCUMENTS):
        _restore(replaced)  # after an update that was killed
    if (folder / engine.MANIFEST).is_file():
        with tempfile.TemporaryDirectory() as space:
            _replace_folder(folder, found_engine(given, Path(space)), fork)
    elif pyproject.is_file() and re.search(r'^ +"lightswitch[ =]', pyproject.read_text(), re.MULTILINE):
        _replace_pin(given, pyproject)
    else:
        raise Refused(f"found neither {engine.FOLDER}/{engine.MANIFEST} nor a requirement of lightswitch in {fork}")
    # with the new engine's code, in a process that has not imported the old one
    subprocess.run([sys.executable, "-m", "lightswitch.config.moved", "conf"], cwd=fork, check=False)


def _replace_folder(folder: Path, new: Source, fork: Path) -> None:
    _refuse_changed(folder, fork)
    manifest = json.loads((folder / engine.MANIFEST).read_text())
    before = engine.read(folder)
    advice = [*_requirements(new, (fork / "pyproject.toml").read_text()), *_beside(new, manifest["commit"], fork)]
    if new.train and _code(new.train) != _code((fork / "train.py").read_text()):
        advice.append("train.py   differs from the train.py of the new engine; merge the changes")
    pages = _pages(new, manifest.get("docs"), fork)
    files = {**new.files, engine.MANIFEST: engine.manifest(new.files, pages or {}, new.version, new.commit)}
    _exchange(folder, {path: File(content) for path, content in files.items()})
    if pages is not None:
        _exchange(fork / tree.DOCUMENTS, {path: File(content) for path, content in pages.items()})
    else:
        advice.append(f"docs       {tree.DOCUMENTS} was not updated: it was changed or removed here, or FROM has none")
    print(f"engine     {_named(manifest['version'], manifest['commit'])} → {_named(new.version, new.commit)}")
    _tell_news(*(content.get(engine.CHANGELOG, b"").decode() for content in (before, new.files)))
    for line in advice:
        print(line)


def _pages(new: Source, known: Mapping[str, str] | None, fork: Path) -> dict[str, bytes] | None:
    """Return the documents of the new engine; None if it has none, or if the fork's documents were changed."""
    if new.root is None or not known or engine.digests(engine.read(fork / tree.DOCUMENTS)) != dict(known):
        return None
    named = re.search(r'^name = "(\w+)"$', (fork / "pyproject.toml").read_text(), re.MULTILINE)
    there = {path for path in repository.tracked(fork) if not path.startswith(f"{engine.FOLDER}/")}
    return tree.documents(
        new.root, named[1] if named else "", {*there, *(f"{engine.FOLDER}/{path}" for path in new.files)}
    )


def _exchange(folder: Path, files: Mapping[str, File]) -> None:
    """Replace a folder: write the files beside it, then rename both.

    A full disk changes nothing. A kill between the two renames leaves no folder, and its old files in `old` beside the
    new ones; `_restore` puts them back in the next update. If the folder is the engine that this command is a part of,
    they must be put back by hand: docs/fork.md says how.
    """
    space = make_tree(_beside_it(folder))
    try:
        write(space / "new", files)
        folder.rename(space / "old")
        (space / "new").rename(folder)
    finally:
        _restore(folder)


def _restore(folder: Path) -> None:
    """Put the old files of a folder back if new ones have not taken their place, and remove what an update left."""
    space = _beside_it(folder)
    if not folder.exists() and (space / "old").exists():
        (space / "old").rename(folder)
    if space.exists():
        remove_tree(space)


def _beside_it(folder: Path) -> Path:
    return folder.parent / f".{folder.name}_update"


def _refuse_changed(folder: Path, fork: Path) -> None:
    """Check that the engine was not changed in the fork, because the changes would be lost.

    Raises:
        Refused: the folder differs from its manifest; the difference is printed before.
    """
    changed = engine.changed(folder)
    if not changed:
        return
    written = repository.git(fork, "log", "-1", "--format=%H", "--", f"{engine.FOLDER}/{engine.MANIFEST}").strip()
    known = engine.named_in_manifest(folder)
    added = [f"{engine.FOLDER}/{path}" for path in changed if path not in known]
    edited = [f"{engine.FOLDER}/{path}" for path in changed if path in known]
    if written and edited:
        print(repository.git(fork, "diff", written, "--", *edited), end="")
    for path in added:
        print(f"new file: {path}")
    back = [f"git checkout {written[:7] or 'COMMIT'} -- {' '.join(edited)}"] if edited else []
    back += [f"rm {' '.join(added)}"] if added else []
    raise Refused(
        f"found changes in {listed([*edited, *added], shown=1)}, which would be lost; revert them "
        f"({'; '.join(back)}), or contribute them to lightswitch"
    )


def _replace_pin(given: str, pyproject: Path) -> None:
    before, pin = pyproject.read_text(), engine.requirement(given)
    news_before = _installed_changelog()
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--force-reinstall", pin]
    if subprocess.run(command).returncode:
        raise Refused(f"pip could not install {pin}; the requirement is unchanged")
    beside = pyproject.with_name(f"{pyproject.name}.new")
    beside.write_text(with_pin(before, pin))
    beside.replace(pyproject)
    print(f"engine     {pin}")
    _tell_news(news_before, _installed_changelog())


def _installed_changelog() -> str:
    path = Path(__file__).resolve().parents[1] / engine.CHANGELOG
    return path.read_text() if path.is_file() else ""


def _tell_news(before: str, now: str) -> None:
    text = news(before, now)
    print(f"\n{text}\n" if text else "changelog  has nothing new")


def _requirements(new: Source, pyproject: str) -> Iterator[str]:
    """Yield a line for each requirement of the new engine that the fork lacks, or has with another version."""
    listed = map(Requirement, re.findall(r'^    "([\w.-]+[^":]*)",', pyproject, re.MULTILINE))
    own = {(one.name, str(one.marker)): one for one in listed}  # a package may have other versions on another Python
    for requirement in map(Requirement, new.requirements):
        found = own.get((requirement.name, str(requirement.marker)))
        if found is None or found.specifier != requirement.specifier:
            put = "add it to" if found is None else f"replace {found} with it in"
            yield f"needs      {requirement}: {put} the dependencies of pyproject.toml, then type make constraints"


def _beside(new: Source, commit: str, fork: Path) -> Iterator[str]:
    """Yield a line for each file that the fork owns and that has changed in lightswitch since its engine's commit."""
    kinds = {"A": "new", "D": "removed", "M": "changed", "T": "changed"}
    for line in new.changed_since(commit):
        kind, *paths = line.split("\t")
        if kind != "A" and not (fork / paths[0]).exists():
            continue
        message = kinds.get(kind, "renamed")
        yield f"beside     {' → '.join(paths)}: {message} in lightswitch; this fork's copy is unchanged"


def _code(train: str) -> str:
    """Return the code of train.py without its docstring, which a fork may change."""
    return train.split('"""', 2)[-1]


def _named(version: str, commit: str) -> str:
    return f"{version} ({commit[:7]})" if commit else version


def news(before: str, now: str) -> str:
    """Return the entries that are new in a changelog, each below the headings of its version and kind.

    Args:
        before: a changelog in Markdown, with headings `## [version]` and, below them, `### Kind`.
        now: a later one of the same form.
    """
    known = set(_entries(before))
    sections: list[str] = []
    shown: tuple[str, ...] = ()
    for entry in _entries(now):
        if entry in known:
            continue
        *headings, text = entry
        sections += [
            heading for level, heading in enumerate(headings) if tuple(headings[: level + 1]) != shown[: level + 1]
        ]
        sections.append(text)
        shown = tuple(headings)
    return re.sub(r"\n\n(?=- )", "\n", "\n\n".join(sections))


def _entries(changelog: str) -> Iterator[tuple[str, ...]]:
    """Yield each list item with its indented lines, or each paragraph, after the headings above it."""
    headings: list[str] = []
    for block in re.split(r"\n\n(?! )|\n(?=- )", changelog):
        text = block.strip("\n")
        if text.startswith("#"):
            heading, _, rest = text.partition("\n")
            level = len(heading) - len(heading.lstrip("#"))
            headings = [*(above for above in headings if above.index(" ") < level), heading]
            text = rest.strip("\n")
        if text and len(headings) > 1:
            yield (*headings[1:], text)


@dataclass(frozen=True)
class Source:
    """An engine to update a fork to.

    Attributes:
        files: contents of the engine's files, by path in its folder.
        commit: of the checkout; empty for a wheel.
        requirements: dependencies of its package, such as `torch>=2.8,<2.16`.
        train: the text of train.py; empty for a wheel.
        root: folder of the checkout; None for a wheel.
    """

    files: Mapping[str, bytes]
    version: str
    requirements: Sequence[str]
    commit: str = ""
    train: str = ""
    root: Path | None = None

    def changed_since(self, commit: str) -> list[str]:
        """Return the lines of `git diff --name-status` for the files that a fork owns; empty if the commit is
        unknown."""
        if self.root is None or not re.fullmatch(r"[0-9a-f]{40}", commit):
            return []
        try:
            return repository.git(self.root, "diff", "--name-status", commit, self.commit, "--", *_BESIDE).splitlines()
        except Refused:  # a shallow clone, or another repository
            return []


def found_engine(given: str, space: Path) -> Source:
    """Read the engine at a path or a git address; a repository is cloned into ``space``.

    Raises:
        Refused: there is no engine, or it has changes that are not committed.
    """
    if given.endswith(".whl"):
        return _wheel(Path(given))
    if Path(given).is_dir():
        return _checkout(Path(given).resolve())
    if engine.is_git(given):
        address, ref = engine.split_git(given)
        repository.git(Path(), "clone", "--quiet", address, str(space / "clone"))
        repository.git(space / "clone", "checkout", "--quiet", "--detach", repository.commit_at(address, ref))
        return _checkout(space / "clone")
    raise Refused(
        f"{given} is not a folder, a wheel or a git address; use ../lightswitch, PATH.whl or git+https://…@REF"
    )


def _checkout(root: Path) -> Source:
    folder = root / engine.FOLDER
    if not (folder / "__init__.py").is_file() or not (root / "pyproject.toml").is_file():
        raise Refused(f"found no {engine.FOLDER} in {root}; name a checkout of lightswitch")
    if (folder / engine.MANIFEST).is_file():
        raise Refused(f"{root} is a fork; name a checkout of lightswitch itself")
    repository.check_clean(root)
    inside = [path for path in repository.tracked(root) if path.startswith(f"{engine.FOLDER}/")]
    files = {path.removeprefix(f"{engine.FOLDER}/"): (root / path).read_bytes() for path in inside}
    if (root / engine.CHANGELOG).is_file():  # in the engine's folder it is a link, or, in older versions, missing
        files[engine.CHANGELOG] = (root / engine.CHANGELOG).read_bytes()
    there = re.search(r"^dependencies = \[\n((?:    .*\n)*)\]", (root / "pyproject.toml").read_text(), re.MULTILINE)
    requirements = re.findall(r'^    "(.*?)"', there[1] if there else "", re.MULTILINE)
    train = (root / "train.py").read_text()
    return Source(files, repository.version(root), requirements, repository.commit(root), train, root)


def _wheel(path: Path) -> Source:
    with zipfile.ZipFile(path) as wheel:
        files = {
            name.removeprefix("lightswitch/"): wheel.read(name)
            for name in wheel.namelist()
            if name.startswith("lightswitch/") and not name.endswith("/")
        }
        if "__init__.py" not in files:
            raise Refused(f"{path} is not a wheel of lightswitch")
        if outside := [name for name in files if name.startswith("/") or ".." in Path(name).parts]:
            raise Refused(f"{path} would write {outside[0]}, outside of the engine; use a wheel that pip built")
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(wheel.read(metadata).decode(), headersonly=True)
    requirements = [field for field in fields.get_all("Requires-Dist", []) if "extra ==" not in field]
    return Source(files, fields["Version"], requirements)


if __name__ == "__main__":
    main()
