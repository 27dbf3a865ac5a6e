"""A run that meets a fault at a file operation, and is started again, ends as one that met none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
SEED = int(
    os.environ.get("FAULT_SEED") or date.today().toordinal()
)  # each day draws others, FAULT_SEED=N those of another
# way, how, cadence, and how many of the operations. At night hundreds (tests/nightly/test_faults.py); all of them:
# python -m tests.engine.faults single:kill:meet:0
FAULTS = (
    ("single:kill:meet:6", "single:kill:stop:4", "single:tear:miss:4", "single:EIO:meet:symlink"),
    ("single:ENOSPC:meet:4", "single:EIO:miss:3", "single:EROFS:stop:3", "single:EACCES:meet:2"),
    ("ddp:kill:meet:2", "fsdp:ENOSPC:miss:2", "deepspeed:kill:stop:2"),
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", FAULTS, ids=["killed", "refused by the disk", "several ranks"])
def test_a_run_that_met_a_fault_ends_as_one_that_met_none(faults: tuple[str, ...]) -> None:
    if shutil.which("cc") is None and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") != "1":
        pytest.skip("there is no C compiler for tests/engine/faults/inject.c")
    command = [sys.executable, "-m", "tests.engine.faults", *faults, f"--seed={SEED}"]
    met = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert met.returncode == 0, met.stdout + met.stderr
