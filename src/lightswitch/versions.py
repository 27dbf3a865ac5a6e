"""Versions of installed packages, and of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable


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
