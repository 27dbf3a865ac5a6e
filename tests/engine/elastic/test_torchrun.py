"""torchrun --nnodes=MIN:MAX with real agents on machines that fail and come back: the run is the same run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from random import Random, SystemRandom

import pytest

from lightswitch.runs import resume
from tests.engine.conftest import Finished, Train
from tests.engine.elastic.agents import HOLD, Agents, Machines

# as those of Slurm, they need root and namespaces
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600), pytest.mark.slurm]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2"])
def test_a_run_loses_rank_0_and_goes_on_with_the_rest_and_then_with_more(
    strategy: str, agents: Agents, train: Train
) -> None:
    agents.strategy = strategy
    (agents.folder / HOLD).write_text("15")
    agents.join(1, 2)
    agents.until_trains_on(1, 2)
    begun = len(agents.starts)  # by one of the agents alone, where the other one came late
    agents.until(lambda: agents.step == 14)  # there is a checkpoint
    agents.lose(1)
    (agents.folder / HOLD).unlink()
    agents.until_trains_on(2)
    agents.join(1)
    agents.until_trains_on(1, 2)
    run = agents.finish()
    is_undisturbed(run, train(*agents.alone))
    lost, joined = agents.starts[begun:]
    assert "precision 32-true, 2 nodes × 1 CPU" in run.out
    assert f"world      2 nodes × 1 → 1 node × 1 at step {lost.step}: lost node1" in run.out
    assert f"world      1 node × 1 → 2 nodes × 1 at step {joined.step}: joined by node1" in run.out
    assert run.column("world") == {start.step: start.size for start in agents.starts[1:]}
    assert lost.step == 10
    assert 0 < lost.trained_twice < 11, "since the last checkpoint"
    assert joined.trained_twice == 0, "notice was given"


@pytest.mark.timeout(7200)  # of 200 changes, on a busy machine
@pytest.mark.parametrize(("strategy", "processes", "changes"), [("fsdp", 2, 20), ("ddp", 1, 200)])
def test_a_chain_of_nodes_that_leave_and_join_at_random_moments(
    strategy: str, processes: int, changes: int, machines: Machines, train: Train, tmp_path: Path, python: Path
) -> None:
    seed = SystemRandom().randrange(10**6)
    draw = Random(seed)
    print(f"seed {seed}")
    agents = Agents(machines, tmp_path, python, strategy, processes)
    try:
        agents.join(1, 2)
        agents.until_trains_on(1, 2)
        left = changes
        while left:
            made = agents.change(draw, nodes=range(1, 5), most=3, among=left)
            left -= len(made)
            print(f"{', '.join(made)}: trains on {sorted(agents.alive)} from step {agents.starts[-1].step}", flush=True)
        is_undisturbed(agents.finish(), train(*agents.alone))
    finally:
        agents.end()
    # after a notice nothing is trained twice, after a loss what came since the save: every 10 steps
    assert all(start.trained_twice <= 11 for start in agents.starts)


def is_undisturbed(run: Finished, alone: Finished) -> None:
    """The same losses, and the same samples in each step, once but in steps that were trained again."""
    assert run.column("train/loss") == pytest.approx(alone.column("train/loss"), abs=1e-6)
    expected, found = samples(alone.folder), samples(run.folder)
    assert found.keys() == expected.keys()
    again = set()  # after a change: steps since the checkpoint, and the one that was begun
    for start in resume.starts(run.run_dir)[1:]:
        again.update(range(start.step, start.step + start.trained_twice + 1))
    for step, of_step in found.items():
        assert set(of_step) == set(expected[step]), f"step {step}"
        assert step in again or len(of_step) == len(expected[step]), f"step {step} was trained twice"


def samples(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step, over all ranks and starts."""
    of_steps = defaultdict(list)
    for path in folder.glob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):  # a rank that was killed may have written half of one
                taken = json.loads(line)
                of_steps[taken["step"]] += taken["ids"]
    return of_steps


def test_a_run_outlives_two_losses_at_once_a_node_that_flaps_and_one_that_is_told_to_leave(
    agents: Agents, train: Train
) -> None:
    agents.join(1, 2, 3)
    agents.until_trains_on(1, 2, 3)
    agents.lose(1, 3)
    agents.until_trains_on(2)
    agents.join(1, 3)
    agents.until_trains_on(1, 2, 3)
    agents.lose(3)
    agents.join(3)  # before the others have given it up
    agents.until(lambda: agents.starts[-1].trained_twice > 0 and len(agents.starts) > 3)
    agents.until_trains_on(1, 2, 3)
    agents.leave(2)
    agents.until_trains_on(1, 3)
    assert agents.starts[-1].trained_twice == 0, "it was given notice"
    is_undisturbed(agents.finish(), train(*agents.alone))
