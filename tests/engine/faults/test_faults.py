"""A run that meets a fault at a file operation, and is started again, ends as one that met none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.night import at_night

CHECKOUT = Path(__file__).parents[3]
# way, how, cadence, and how many of the operations. At night a thousand (tests/nightly/test_faults.py); all of them:
# python -m tests.engine.faults single:kill:meet:0
FAULTS = [
    "single:kill:meet:2",
    "single:lacks:meet:both",
    *at_night("single:EIO:meet:symlink", "fsdp:lacks:miss:both"),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", FAULTS)
def test_a_run_that_met_a_fault_ends_as_one_that_met_none(faults: str) -> None:
    if shutil.which("cc") is None and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") != "1":
        pytest.skip("there is no C compiler for tests/engine/faults/inject.c")
    command = [sys.executable, "-m", "tests.engine.faults", faults]
    met = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert met.returncode == 0, met.stdout + met.stderr
