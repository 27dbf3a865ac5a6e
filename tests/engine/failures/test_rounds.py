"""Ranks learn of one another in the same steps, at each one where steps are long and at few of many short ones."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import torch.distributed as dist

from lightswitch.failures import stopping
from lightswitch.failures.stopping import Rounds
from tests.engine.monitoring.clock import Clock
from tests.pool import Pool

LONG_STEPS, SHORT_STEPS, ASKS_IN_STEP = 3, 100, 50  # rank 1 gives another number from a certain step on


def test_a_process_that_is_alone_answers_itself_in_each_step() -> None:
    rounds = Rounds(None)
    assert [(rounds.end_before_step(), rounds.end(number)) for number in (0, 2, 1)] == [(True, 0), (True, 2), (True, 1)]


def test_ranks_end_a_round_before_the_same_steps(pool: Pool) -> None:
    ended, by_rank_1 = pool(2)(_steps)
    assert ended == by_rank_1
    steps = [step for step, _ in ended]
    assert steps[: LONG_STEPS + 1] == list(range(LONG_STEPS + 1))
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 16
    assert len(steps) < SHORT_STEPS / 4
    heard = [step for step, largest in ended if largest]
    assert ASKS_IN_STEP < heard[0] <= ASKS_IN_STEP + 16


def _steps() -> list[tuple[int, int]]:
    """The steps before which a round has ended in this rank, with the largest number that was given.

    By a clock of its own, which knows nothing of how busy the machine is.
    """
    dist.init_process_group("gloo")
    rank, ended, clock = dist.get_rank(), [], Clock()
    rounds = Rounds(dist.group.WORLD)
    with patch.object(stopping, "perf_counter", clock):
        _train(rounds, rank, ended, clock)
    return ended


def _train(rounds: Rounds, rank: int, ended: list[tuple[int, int]], clock: Clock) -> None:
    for step in range(LONG_STEPS + SHORT_STEPS):
        number = int(rank == 1 and step >= ASKS_IN_STEP)
        if rounds.end_before_step():
            ended.append((step, rounds.end(number)))
        clock.sleep(0.3 if step < LONG_STEPS else 0.001 * (1 + rank))
        rounds.begin(number)
