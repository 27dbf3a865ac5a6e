"""What lightswitch itself depends on, in a folder of links: an environment without the packages of extras."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Found = dict[tuple[str, frozenset[str]], Distribution]


def link_into(folder: Path, *requirements: str) -> None:
    """Link the modules and the metadata of requirements, and of theirs, into a folder for sys.path.

    Args:
        requirements: as in `lightswitch[deepspeed]`, all of which are installed; without any, lightswitch.
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
    except PackageNotFoundError:  # another platform's, or one that an extra of a dependency names
        return
    for needed in map(Requirement, package.requires or ()):
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *key[1])):
            _add(needed, found)


def _top_level(package: Distribution) -> Iterator[Path]:
    for file in package.files or ():
        # scripts lie above; a .pth would lead to an installed checkout, and is read in site-packages alone
        if file.parts[0] not in ("..", "__pycache__") and file.suffix != ".pth":
            yield Path(str(package.locate_file(file.parts[0])))
