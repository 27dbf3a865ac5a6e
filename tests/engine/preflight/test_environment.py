"""Variables of launchers that mean nothing, or came without the others: a line each, or a run that is right."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from lightning.fabric.utilities.rank_zero import _get_rank

from lightswitch.cluster import environments, placement
from lightswitch.errors import RefusedRequest
from lightswitch.preflight import devices
from tests.engine.cluster.test_placement import BATCH_SHELL, EXPORTED, SRUN, TORCHRUN
from tests.engine.conftest import CHECKOUT

TABLE = yaml.safe_load(Path(__file__).with_name("environment.yaml").read_text())


@pytest.mark.parametrize("variables", TABLE["refused"])
def test_junk_is_told_with_what_was_expected_and_what_to_type(variables: str) -> None:
    (line,) = _answer(_environ(variables))
    assert line.startswith(TABLE["refused"][variables])


@pytest.mark.parametrize("variables", TABLE["right"])
def test_what_means_something_is_taken_at_its_word(variables: str) -> None:
    assert _answer(_environ(variables)) == []


CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
VALUES = (
    *("", " ", "0", "1", "2", "3", "8", "-1", "abc", "99999", "0.5", "1,2", "½", "³", "node1", "True"),
    *("1" * 5000, "a\nb"),
)
SPOKEN = sorted({*TORCHRUN, *EXPORTED, *CHILD})


@pytest.mark.parametrize("seed", range(20))
def test_any_environment_is_refused_in_lines_or_is_a_place_in_a_run(seed: int) -> None:
    drawn, refused = random.Random(seed), 0
    for _ in range(150):
        whole = drawn.choice([{}, TORCHRUN, {**SRUN, "SLURM_NODELIST": "node[1-2]"}, EXPORTED, CHILD, BATCH_SHELL])
        lost = [name for name in whole if drawn.random() < 0.1 and name not in ("SLURM_JOB_ID", "SLURM_NODELIST")]
        environ = {name: value for name, value in whole.items() if name not in lost}
        environ |= {name: drawn.choice(VALUES) for name in drawn.sample(SPOKEN, drawn.choice((0, 1, 1, 2, 5)))}
        lines = _answer(environ)
        refused += bool(lines)
        for line in lines:
            assert "\n" not in line, environ
            assert any(name in line for name in (*SPOKEN, *SRUN)) or " started " in line, (environ, line)
    assert 0 < refused < 150


def _environ(variables: str) -> dict[str, str]:
    return dict(variable.split("=", 1) for variable in variables.split())


def _answer(environ: Mapping[str, str]) -> list[str]:
    """The lines by which a process is refused; of one that is not, all that is read later means the same place."""
    os.environ.clear()  # the fixture `environment` puts it back
    os.environ.update(environ)
    try:
        devices.check_environment()
    except RefusedRequest as mistakes:
        return mistakes.problems
    place = placement.detect()
    problems = list(
        devices.process_problems({"trainer": {"num_nodes": place.nodes, "devices": place.devices_per_node or 2}}, place)
    )
    if problems:
        return problems
    met = environments.detect()
    per_node = place.devices_per_node or 2
    assert 1 <= met.main_port < 2**16
    assert met.main_address.strip()
    assert (met.node_rank() == met.local_rank() == 0) == (place.rank == 0)
    assert not (_get_rank() and place.rank == 0)  # by which Lightning is silent
    if place.is_external:
        assert met.global_rank() == place.rank < met.world_size() == place.nodes * per_node
    if place.is_external:
        assert met.node_rank() * per_node + met.local_rank() == place.rank
        met.validate_settings(num_devices=per_node, num_nodes=place.nodes)
    return []


@pytest.mark.parametrize("start", [("train.py", "--help"), ("-m", "lightswitch.doctor")])
def test_windows_is_refused_in_one_line_by_every_start(start: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.platform = 'win32'\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *start], cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    told = "error: found Windows, expected Linux or macOS; type wsl --install, and start it in WSL\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
