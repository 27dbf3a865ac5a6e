"""A folder of links to the dependencies of lightswitch: an environment without the packages of extras."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Found = dict[tuple[str, frozenset[str]], Distribution]


def link_into(folder: Path, *requirements: str) -> None:
    """Link the modules and metadata of requirements, and of their dependencies, into a folder for sys.path.

    Args:
        requirements: such as `lightswitch[deepspeed]`, all of them installed; lightswitch if there are none.
    """
    found: Found = {}
    for requirement in requirements or ("lightswitch",):
        _add(Requirement(requirement), found)
    for path in {path for one in found.values() for path in _top_level(one)}:
        (folder / path.name).symlink_to(path)


def _add(requirement: Requirement, found: Found) -> None:
    key = canonicalize_name(requirement.name), frozenset(requirement.extras)
    if key in found:
        return
    try:
        found[key] = package = distribution(requirement.name)
    except PackageNotFoundError:  # for another platform, or for an extra of a dependency
        return
    for needed in map(Requirement, package.requires or ()):
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *key[1])):
            _add(needed, found)


def _top_level(package: Distribution) -> Iterator[Path]:
    for file in package.files or ():
        # scripts are outside; a .pth would refer to an installed checkout, and is only read in site-packages
        if file.parts[0] not in ("..", "__pycache__") and file.suffix != ".pth":
            yield Path(str(package.locate_file(file.parts[0])))
