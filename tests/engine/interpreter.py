"""A Python that has what lightswitch and its tests need, and no other extras.

It starts a run in two thirds of the time: torchmetrics imports SciPy, transformers and Matplotlib wherever they are.
"""

from __future__ import annotations

import os
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from benchmarks import dependencies
from tests.runs import CHECKOUT

PACKAGES = ("lightswitch[deepspeed,dev,optuna,submitit]", "pip", "wheel")


@pytest.fixture(scope="session", autouse=True)
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python` means in the commands of tests; `sys.executable` has all extras.

    Where lightswitch is not installed but on the path, as on a machine that is lent with a GPU, nothing says which
    packages are extras, and it is `sys.executable` as well.
    """
    try:
        distribution("lightswitch")
    except PackageNotFoundError:
        return Path(sys.executable)
    made = make(tmp_path_factory.mktemp("python"))
    os.environ["PATH"] = f"{made.parent}{os.pathsep}{os.environ['PATH']}"
    return made


def make(folder: Path) -> Path:
    """Make an environment of links to the packages of this one; return its interpreter."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    dependencies.link_into(site, *PACKAGES)
    (site / "checkout.pth").write_text(f"{CHECKOUT / 'src'}\n")
    return folder / "bin/python"
