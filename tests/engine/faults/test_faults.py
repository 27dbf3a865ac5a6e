"""A run that meets a fault at a file operation, and is started again, ends as one that met none."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Train
from tests.engine.faults.__main__ import CADENCES, ERRORS, RUN, WAYS, ended, library
from tests.engine.processes import TRAIN_PY
from tests.night import at_night

# way, how, cadence, and how many of the operations. At night a thousand, below; all of them:
# python -m tests.engine.faults single:kill:meet:0
FAULTS = [
    "single:kill:meet:2",
    *at_night("single:lacks:meet:both", "single:EIO:meet:symlink", "fsdp:lacks:miss:both"),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", FAULTS)
def test_a_run_that_met_a_fault_ends_as_one_that_met_none(faults: str) -> None:
    if shutil.which("cc") is None and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") != "1":
        pytest.skip("there is no C compiler for tests/engine/faults/inject.c")
    command = [sys.executable, "-m", "tests.engine.faults", faults]
    met = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert met.returncode == 0, met.stdout + met.stderr


# A run that meets a fault at a file operation, and is started again, ends as one that met none: a thousand times


POINTS = 14  # of each way, kind of fault and cadence: 1,008 in all


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cadence", CADENCES)
@pytest.mark.parametrize("how", ["kill", "tear", *ERRORS])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_met_one_of_a_thousand_faults_ends_as_one_that_met_none(way: str, how: str, cadence: str) -> None:
    seed = random.randrange(10**6)  # which is printed
    command = [sys.executable, "-m", "tests.engine.faults", f"{way}:{how}:{cadence}:{POINTS}", f"--seed={seed}"]
    met = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert met.returncode == 0, met.stdout + met.stderr


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_of_torchrun_that_met_a_fault_ends_as_one_that_met_none(
    strategy: str, train: Train, tmp_path: Path
) -> None:
    run = (*RUN, *CADENCES["meet"], f"strategy={strategy}")
    whole = ended(train(*run, ranks=2).run_dir)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN_PY, *run]
    for number in sorted(random.Random(strategy).sample(range(30, 400), 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault = {"LD_PRELOAD": str(library()), "FAULT_UNDER": f"{folder}/runs", "FAULT_RANK": "0"}
        fault |= {"FAULT_AT": str(number), "FAULT_HOW": "kill"}
        plain = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        met = subprocess.run(command, cwd=folder, env={**plain, **fault}, capture_output=True, text=True, check=False)
        assert met.returncode != 0, "the fault was met"
        subprocess.run(command, cwd=folder, env=plain, capture_output=True, check=True)
        assert ended(folder / "runs/plainmodel/mine").difference(whole) is None, number
