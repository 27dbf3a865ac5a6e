"""What a run may be called: text as it was typed, and never a way out of runs/."""

from __future__ import annotations

import pytest

from tests.engine.config.mistaken import Answer, answers
from tests.engine.conftest import PLAIN

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


NO_NAMES_OF_LAUNCHERS = (
    "SLURM_JOB_ID=../../x SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1",
    "TORCHELASTIC_RUN_ID=../../x RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500",
)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    commands = {override: [*PLAIN, override] for override in NO_NAMES}
    commands |= {exported: [*exported.split(), *PLAIN] for exported in NO_NAMES_OF_LAUNCHERS}
    commands["a sweep"] = ["-m", *PLAIN, "seed=1,2", "run_id=../../x"]
    return answers(commands, tmp_path_factory.mktemp("names"))


def test_what_is_no_name_is_refused_before_anything_is_written(answered: dict[str, Answer]) -> None:
    for override, line in NO_NAMES.items():
        answer = answered[override]
        assert (answer.returncode, answer.err, answer.left) == (2, f"error: {line}\n", []), override


@pytest.mark.parametrize("start", [*NO_NAMES_OF_LAUNCHERS, "a sweep"])
def test_neither_a_launchers_id_nor_a_sweep_is_a_way_out(start: str, answered: dict[str, Answer]) -> None:
    answer = answered[start]
    assert (answer.returncode, answer.err.count("\n"), answer.left) == (2, 1, [])
    assert answer.err.startswith("error: run_id='../../x' is no valid name")
