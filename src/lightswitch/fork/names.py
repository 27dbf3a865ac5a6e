"""Whether a package of a given name would stand in the way of another."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from lightswitch.errors import Refused

_TAKEN = ("lightswitch", "tests", "train", "conf", "src", "slurm")  # what lies, or is imported, beside the package
_IMPORTED_AS = {"hydra-core": "hydra", "pyyaml": "yaml", "scikit-learn": "sklearn", "protobuf": "google"}


def check(name: str, root: Path) -> None:
    """Check that a fork's package may have a name.

    Raises:
        Refused: it is no name of a package, or another has it.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise Refused(f"{name} is no name of a Python package; use lower-case letters, digits and _, as in bird_song")
    if name in _TAKEN:
        raise Refused(f"{name} is the name of something else in the project; choose another")
    if name in sys.stdlib_module_names:
        raise Refused(f"{name} is a module of Python's standard library; choose another name")
    if name in _pinned(root) or _is_installed(name, root):
        raise Refused(f"{name} is the name of an installed package; choose another")


def _pinned(root: Path) -> set[str]:
    """Return the names of the packages that the project installs, which may not have been yet."""
    pins = re.findall(r"^([\w.-]+)==", (root / "constraints.txt").read_text(), re.MULTILINE)
    return {_IMPORTED_AS.get(pin.lower(), pin.lower().replace("-", "_")) for pin in pins}


def _is_installed(name: str, root: Path) -> bool:
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder without code counts for nothing
        return False
    return not Path(found.origin).resolve().is_relative_to(root)
