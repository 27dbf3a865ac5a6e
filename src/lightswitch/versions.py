"""Versions of installed packages, and of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

_MANIFEST = Path(__file__).with_name("engine.json")  # of an engine that is a folder of a fork, and not installed


def of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, by its name; others are left out."""
    from importlib.metadata import PackageNotFoundError, version  # when needed: a mistake is to be told at once

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if package == "lightswitch" and _MANIFEST.is_file():
                found[package] = json.loads(_MANIFEST.read_text())["version"]
    return found
