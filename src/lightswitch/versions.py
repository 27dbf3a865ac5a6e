"""Versions of installed packages, and of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable


def beyond_bounds() -> list[str]:
    """Return the requirements that installed packages do not meet, each with the installed version.

    pip reports this only on installation: another package may have upgraded torch since.
    """
    return unmet(required_by("lightswitch"))


def unmet(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that installed packages do not meet; packages that are not installed are ignored."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    found = []
    for one in (one for one in map(Requirement, requirements) if one.marker is None):
        with contextlib.suppress(PackageNotFoundError):  # an extra
            if not one.specifier.contains(there := version(one.name), prereleases=True):
                found.append(f"{one.name} {there}, expected {one}")
    return found


def of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, by its name; others are left out."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and not needed to report a mistake

    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def required_by(package: str) -> list[str]:
    """Return the requirements of a package, as its metadata states them; none if only its code is there."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []
