"""What a run may be called: text as it was typed, and never a way out of runs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN, Train
from tests.engine.processes import TRAIN_PY, Start, said

NO_NAMES = {
    "run_id=../../x": "run_id='../../x' is no valid name: letters, digits and . _ - = , are allowed; type run_id=NAME",
    "run_id=a/b": "run_id='a/b' is no valid name: letters, digits and . _ - = , are allowed; type run_id=NAME",
    "run_id=it's": 'run_id="it\'s" is no valid name: letters, digits and . _ - = , are allowed; type run_id=NAME',
    "run_id=a(b)": "run_id='a(b)' is no valid name: letters, digits and . _ - = , are allowed; type run_id=NAME",
    "run_id=größe": "run_id='größe' is no valid name: letters, digits and . _ - = , are allowed; type run_id=NAME",
    "run_id=": "run_id is empty; type run_id=NAME",
    "run_id=.": "run_id=. can't be the name of a folder; type run_id=NAME",
    "name=..": "name=.. can't be the name of a folder; type name=NAME",
    "name=": "name is empty; type name=NAME",
    "name=../x": "name='../x' is no valid name: letters, digits and . _ - = , are allowed; type name=NAME",
    f"run_id={129 * 'x'}": "run_id has 129 characters, and 128 are allowed; type run_id=NAME",
}


@pytest.mark.parametrize("override", NO_NAMES)
def test_what_is_no_name_is_refused_before_anything_is_written(override: str, train: Train) -> None:
    refused = train(*PLAIN, override, check=False)
    assert (refused.returncode, refused.err) == (2, f"error: {NO_NAMES[override]}\n")
    assert list(refused.folder.iterdir()) == []


@pytest.mark.parametrize(
    "launcher",
    [
        {"SLURM_JOB_ID": "../../x", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {
            "TORCHELASTIC_RUN_ID": "../../x",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        },
    ],
    ids=["Slurm", "torchrun"],
)
def test_a_launchers_id_is_no_way_out_either(launcher: dict[str, str], start: Start, tmp_path: Path) -> None:
    refused = start("python", TRAIN_PY, *PLAIN, **launcher)
    out = said(refused)
    assert (refused.returncode, out.count("\n")) == (2, 1), out
    assert out.startswith("error: run_id='../../x' is no valid name")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_no_way_out_either(start: Start, tmp_path: Path) -> None:
    refused = start("python", TRAIN_PY, "-m", *PLAIN, "seed=1,2", "run_id=../../x")
    out = said(refused)
    assert (refused.returncode, out.startswith("error: run_id='../../x' is no valid name")) == (2, True)
    assert list(tmp_path.iterdir()) == []
