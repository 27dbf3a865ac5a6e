"""The fixtures of the engine's tests; what runs train.py for them is in tests/runs.py."""

from __future__ import annotations

import os
import sys
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from benchmarks import dependencies
from tests.engine.fits import fits
from tests.engine.processes import port, start
from tests.pool import pool
from tests.runs import CHECKOUT, Finished, Train, as_torchrun, context, environment, no_gpus, once, runs_in

__all__ = ["CHECKOUT", "PLAIN", "PLAIN_DATA", "PLAIN_MODEL", "Finished", "Train", "as_torchrun", "context"]
__all__ += ["environment", "fits", "no_gpus", "once", "pool", "port", "python", "runs_in", "start", "train"]  # fixtures

PLAIN_MODEL, PLAIN_DATA = "model._target_=tests.engine.plain.PlainModel", "data._target_=tests.engine.plain.PlainData"
PLAIN = (PLAIN_MODEL, PLAIN_DATA)


@pytest.fixture
def train(tmp_path: Path, python: Path) -> Train:
    return runs_in(tmp_path, python)


DEV = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
PACKAGES = ("lightswitch[deepspeed,optuna]", "pip", "wheel", *DEV)


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
