"""What lightswitch itself depends on, in a folder of links: an environment without the packages of extras."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def link_into(folder: Path) -> None:
    """Link the modules and the metadata of lightswitch's dependencies, and of theirs, into a folder for sys.path."""
    found: dict[str, Distribution] = {}
    _add("lightswitch", found)
    for path in {path for one in found.values() for path in _top_level(one)}:
        (folder / path.name).symlink_to(path)


def _add(name: str, found: dict[str, Distribution]) -> None:
    if canonicalize_name(name) in found:
        return
    try:
        found[canonicalize_name(name)] = package = distribution(name)
    except PackageNotFoundError:  # another platform's, or one that an extra of a dependency names
        return
    for needed in map(Requirement, package.requires or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            _add(needed.name, found)


def _top_level(package: Distribution) -> Iterator[Path]:
    for file in package.files or ():
        if file.parts[0] not in ("..", "__pycache__"):  # scripts lie above
            yield Path(str(package.locate_file(file.parts[0])))
