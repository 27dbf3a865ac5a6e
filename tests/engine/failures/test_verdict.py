"""The rules by which rank 0 says what failed first, and what it hears of ranks for that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import lightswitch
from lightswitch.errors import Failure
from lightswitch.failures import stopping
from lightswitch.failures.classify import Rank
from lightswitch.failures.stopping import Rounds
from lightswitch.failures.watchdog import ANSWER_SECONDS, Position, RankState, Timeouts, position, verdict
from tests.engine.monitoring.conftest import Clock
from tests.pool import Pool

TIMEOUTS = Timeouts(lost_after_seconds=60, hung_after_seconds=1000)
WAITS = Position("distributed.py:1 in all_reduce: wait()", waits=True)
WORKS = Position("model.py:7 in step: f()", waits=False)
CLOSED = Failure("rank 0 failed: RuntimeError: Connection closed by peer", follows=True)
BUG = Failure("rank 1 failed: ValueError: a bug")


def _state(number: int, now: float, **told: object) -> RankState:
    return replace(RankState(Rank(number, 4, f"node{number // 2 + 1}", 100 + number), now, moved=now), **told)


@pytest.mark.parametrize("follows_first", [True, False])
def test_an_error_of_its_own_comes_before_one_that_follows(follows_first: bool) -> None:
    at = (1.0, 2.0) if follows_first else (2.0, 1.0)
    ranks = [_state(0, 2, failure=CLOSED, failed=at[0]), _state(1, 2, failure=BUG, failed=at[1])]
    assert verdict(ranks, 2, TIMEOUTS) == BUG


def test_an_error_that_follows_waits_for_the_rank_it_follows_from() -> None:
    ranks = [_state(0, 2, failure=CLOSED, failed=2), _state(1, 3), _state(2, 2), _state(3, 2)]
    assert verdict(ranks, 3, TIMEOUTS) is None
    told = verdict(ranks, 3 + ANSWER_SECONDS, TIMEOUTS)
    assert told is not None
    assert told.line.startswith("ranks 2, 3 on node2 were lost: nothing heard for 15 s")


def test_an_error_that_follows_from_nothing_is_the_first() -> None:
    ranks = [_state(0, 2, failure=CLOSED, failed=2), *(_state(number, 3) for number in (1, 2, 3))]
    assert verdict(ranks, 4, TIMEOUTS) == CLOSED


@pytest.mark.parametrize(
    ("lacks_memory", "line"),
    [
        (False, "rank 1 of 4 on node1 failed: process 101 ended without an error message: it was killed, or crashed "),
        (True, "rank 1 of 4 on node1 failed: process 101 was killed because node1 ran out of memory"),
    ],
)
def test_what_ended_without_a_message_is_named(lacks_memory: bool, line: str) -> None:
    ranks = [_state(number, 2, gone=2.0 if number == 1 else None, lacks_memory=lacks_memory) for number in range(4)]
    assert verdict(ranks, 2.1, TIMEOUTS) is None
    told = verdict(ranks, 3, TIMEOUTS)
    assert told is not None
    assert told.line.startswith(line)


def test_of_a_hang_the_rank_is_blamed_that_waits_for_nobody() -> None:
    ranks = [_state(number, 1001, moved=0, progress=5, position=WORKS if number == 2 else WAITS) for number in range(4)]
    told = verdict(ranks, 1003, TIMEOUTS)
    assert told is not None
    assert told.line == f"rank 2 of 4 on node2 hangs at {WORKS.location}; no rank began a batch for 1000 s"
    assert told.details.splitlines() == [f"ranks 0, 1, 3 at {WAITS.location}", f"rank 2 at {WORKS.location}"]


def test_a_rank_left_alone_may_take_its_time() -> None:
    ranks = [_state(0, 5000, moved=0), *(_state(number, 9, left=True) for number in (1, 2, 3))]
    assert verdict(ranks, 5010, TIMEOUTS) is None


def test_a_position_names_the_line_of_the_code_that_called() -> None:
    assert "test_verdict.py" in position().location
    assert not position().waits


def test_a_package_beside_the_engine_is_the_users_own() -> None:
    beside = str(Path(lightswitch.__file__).parents[1] / "birdsong/net.py")
    names: dict[str, Any] = {"position": position}
    exec(compile("def training_step():\n    return position()\n", beside, "exec"), names)
    assert names["training_step"]().location.startswith(f"{beside}:2 in training_step")


# Ranks learn of one another in the same steps, at each one where steps are long and at few of many short ones

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
