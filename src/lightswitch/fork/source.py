"""An engine to take over: the files of a checkout, of a git repository or of a wheel."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from lightswitch.errors import Refused
from lightswitch.fork import checkout, engine

_BESIDE = ("conf", "slurm", "Makefile", "train.py")  # what a fork took once, and keeps as its own


@dataclass(frozen=True)
class Source:
    """An engine to update a fork to.

    Attributes:
        files: of the engine, by their path in its folder.
        commit: of the checkout; nothing of a wheel.
        requirements: what pip installs with it, as `torch>=2.8,<2.14`.
        train: the text of train.py, where it is known.
        root: the checkout; None of a wheel.
    """

    files: Mapping[str, bytes]
    version: str
    requirements: Sequence[str]
    commit: str = ""
    train: str = ""
    root: Path | None = None

    def changed_since(self, commit: str) -> list[str]:
        """Return the lines of `git diff --name-status` on what a fork has of its own; none where the commit is not
        known."""
        if self.root is None or not re.fullmatch(r"[0-9a-f]{40}", commit):
            return []
        try:
            return checkout.git(self.root, "diff", "--name-status", commit, self.commit, "--", *_BESIDE).splitlines()
        except Refused:  # a shallow clone, or another repository
            return []


def find(given: str, space: Path) -> Source:
    """Read the engine at a path or a git address; a repository is cloned into ``space``.

    Raises:
        Refused: there is no engine, or one with changes that are not committed.
    """
    if given.endswith(".whl"):
        return _wheel(Path(given))
    if Path(given).is_dir():
        return _checkout(Path(given).resolve())
    if engine.is_git(given):
        address, ref = engine.split_git(given)
        checkout.git(Path(), "clone", "--quiet", address, str(space / "clone"))
        checkout.git(space / "clone", "checkout", "--quiet", "--detach", checkout.commit_at(address, ref))
        return _checkout(space / "clone")
    raise Refused(
        f"{given} is no folder, no wheel and no git address; use ../lightswitch, PATH.whl or git+https://…@REF"
    )


def _checkout(root: Path) -> Source:
    folder = root / engine.FOLDER
    if not (folder / "__init__.py").is_file() or not (root / "pyproject.toml").is_file():
        raise Refused(f"found no {engine.FOLDER} in {root}; name a checkout of lightswitch")
    if (folder / engine.MANIFEST).is_file():
        raise Refused(f"{root} is a fork; name a checkout of lightswitch itself")
    checkout.check_clean(root)
    inside = [path for path in checkout.tracked(root) if path.startswith(f"{engine.FOLDER}/")]
    files = {path.removeprefix(f"{engine.FOLDER}/"): (root / path).read_bytes() for path in inside}
    if (root / engine.CHANGELOG).is_file():  # where the engine's own is a link to it, or, of an older one, is not there
        files[engine.CHANGELOG] = (root / engine.CHANGELOG).read_bytes()
    there = re.search(r"^dependencies = \[\n((?:    .*\n)*)\]", (root / "pyproject.toml").read_text(), re.MULTILINE)
    requirements = re.findall(r'^    "(.*?)"', there[1] if there else "", re.MULTILINE)
    train = (root / "train.py").read_text()
    return Source(files, checkout.version(root), requirements, checkout.commit(root), train, root)


def _wheel(path: Path) -> Source:
    with zipfile.ZipFile(path) as wheel:
        files = {
            name.removeprefix("lightswitch/"): wheel.read(name)
            for name in wheel.namelist()
            if name.startswith("lightswitch/") and not name.endswith("/")
        }
        if "__init__.py" not in files:
            raise Refused(f"{path} is no wheel of lightswitch")
        if outside := [name for name in files if name.startswith("/") or ".." in Path(name).parts]:
            raise Refused(f"{path} would write {outside[0]}, outside of the engine; take one that pip has built")
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(wheel.read(metadata).decode(), headersonly=True)
    requirements = [field for field in fields.get_all("Requires-Dist", []) if "extra ==" not in field]
    return Source(files, fields["Version"], requirements)
