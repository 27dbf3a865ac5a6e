"""Processes of one run that were given different words."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.engine.launch.test_launchers import RUN, TIMEOUT_SECONDS
from tests.engine.processes import TRAIN_PY, Start


def test_ranks_that_were_given_different_values_are_told_once(start: Start, tmp_path: Path, port: str) -> None:
    (tmp_path / "runs/plainmodel/mine").mkdir(parents=True)
    (tmp_path / "runs/plainmodel/mine/config.yaml").write_text("an earlier run's")
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [start("python", TRAIN_PY, *RUN, "run_id=mine", f"seed={r}", **common, RANK=str(r)) for r in (0, 1)]
    outs = [rank.communicate(timeout=TIMEOUT_SECONDS)[0] for rank in ranks]
    host = socket.gethostname()
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert outs[0].endswith(
        f"\nerror: rank 1 on {host} has seed=1, rank 0 on {host} has seed=0; give every process the same overrides\n"
    )
    assert outs[1] == ""
    assert (tmp_path / "runs/plainmodel/mine/config.yaml").read_text() == "an earlier run's"
