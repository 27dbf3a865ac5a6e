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
