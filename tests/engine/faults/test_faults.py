"""A run that meets a fault at a file operation, and is started again, ends as one that met none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
# way, how, cadence, and how many of the operations; all of them: python -m tests.engine.faults --points 0
FAULTS = (
    *(("single", "kill", cadence, 12) for cadence in ("meet", "miss", "stop")),
    *(("single", "tear", "meet", 8), ("single", "ENOSPC", "meet", 10), ("single", "EIO", "miss", 6)),
    *(("single", "EROFS", "stop", 6), ("single", "EACCES", "meet", 6)),
    *(("ddp", "kill", "meet", 8), ("ddp", "ENOSPC", "miss", 6)),
    *(("fsdp", "kill", "miss", 6), ("fsdp", "EIO", "meet", 4)),
    *(("deepspeed", "kill", "stop", 4), ("deepspeed", "ENOSPC", "meet", 4)),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "how", "cadence", "points"), FAULTS)
def test_a_run_that_met_a_fault_ends_as_one_that_met_none(way: str, how: str, cadence: str, points: int) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler for tests/engine/faults/inject.c")
    command = [sys.executable, "-m", "tests.engine.faults", "--way", way, "--how", how, "--cadence", cadence]
    met = subprocess.run([*command, f"--points={points}"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert met.returncode == 0, met.stdout + met.stderr
