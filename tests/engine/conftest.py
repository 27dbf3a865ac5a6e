"""The fixtures of the engine's tests; what runs train.py for them is in tests/runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.fits import fits
from tests.engine.interpreter import python
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
