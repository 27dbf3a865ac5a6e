"""Versions of installed packages, and of the engine."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

_MANIFEST = Path(__file__).with_name("engine.json")  # of an engine that is a folder of a fork, not installed


def beyond_bounds(script: Path) -> list[str]:
    """Return the requirements that installed packages do not meet, each with the installed version.

    pip reports this only on installation: another package may have upgraded torch since.

    Args:
        script: the script beside which a fork, whose engine is a folder, has its pyproject.toml.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return unmet(requires("lightswitch") or [])
    except PackageNotFoundError:
        project = script.with_name("pyproject.toml")
        listed = re.findall(r'^ +"([a-z][\w-]*[<>=][^"]*)",', project.read_text(), re.M) if project.is_file() else []
        return unmet(listed)


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
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if package == "lightswitch" and _MANIFEST.is_file():
                found[package] = json.loads(_MANIFEST.read_text())["version"]
    return found


def required_by(package: str) -> list[str]:
    """Return the requirements of an installed package, as its metadata states them."""
    from importlib.metadata import requires

    return requires(package) or []
