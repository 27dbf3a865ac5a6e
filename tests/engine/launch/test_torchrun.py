"""torchrun with real agents: one run, in one run directory, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Finished, Train
from tests.engine.failures.pace import FAILS_ONCE
from tests.engine.launch.test_launchers import RUN, finish
from tests.engine.processes import TRAIN_PY, Start
from tests.night import at_night

TORCHRUN = ("python", "-m", "torch.distributed.run")


@pytest.mark.parametrize("nodes", [1, *at_night(2)])
def test_a_run_that_agents_restart_goes_on_where_it_stood(
    nodes: int, start: Start, train: Train, tmp_path: Path, port: str
) -> None:
    """Agents of two nodes, which are given no id of the run, or one of both processes."""
    place = (f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}")
    place += ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--max-restarts=1")
    place += ("--rdzv-id=mine",) if nodes == 1 else ()
    run = (*RUN, "trainer.max_steps=8", "trainer.log_every_n_steps=1")
    fails = (FAILS_ONCE, "callbacks.fails.step=5")
    agents = [start(*TORCHRUN, *place, TRAIN_PY, *run, *fails) for _ in range(nodes)]
    out = "".join(finish(agent) for agent in agents)
    assert "RuntimeError: a passing fault" in out
    restarted, uninterrupted = Finished(0, out, "", tmp_path), train(*run, "strategy=single")
    assert f"resumes    runs/plainmodel/{restarted.run_dir.name}/checkpoints/best.ckpt, at step 4" in out
    assert restarted.column("train/loss") == pytest.approx(uninterrupted.column("train/loss"), abs=1e-5)
