"""A run that meets a fault at a file operation, and is started again, ends as one that met none."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from tests.engine.faults.__main__ import CADENCES, ERRORS

CHECKOUT = Path(__file__).parents[3]
# each day draws others, FAULT_SEED=N those of another
SEED = int(os.environ.get("FAULT_SEED") or date.today().toordinal())
_draw = random.Random(SEED).choice
# way, how, cadence, and how many of the operations. At night a thousand (tests/nightly/test_faults.py); all of them:
# python -m tests.engine.faults single:kill:meet:0
FAULTS = {
    "killed": (f"single:kill:{_draw([*CADENCES])}:3", f"single:tear:{_draw([*CADENCES])}:2"),
    "refused by the disk": (f"single:{_draw(ERRORS)}:{_draw([*CADENCES])}:3", "single:EIO:meet:symlink"),
    "on a disk that lacks links and syncs": ("single:lacks:meet:both", "fsdp:lacks:miss:both"),
    "several ranks": (_draw(("ddp:kill:meet:2", "fsdp:ENOSPC:miss:2", "deepspeed:kill:stop:2")),),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", FAULTS.values(), ids=[*FAULTS])
def test_a_run_that_met_a_fault_ends_as_one_that_met_none(faults: tuple[str, ...]) -> None:
    if shutil.which("cc") is None and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") != "1":
        pytest.skip("there is no C compiler for tests/engine/faults/inject.c")
    command = [sys.executable, "-m", "tests.engine.faults", *faults, f"--seed={SEED}"]
    met = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert met.returncode == 0, met.stdout + met.stderr
