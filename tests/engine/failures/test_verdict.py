"""The rules by which the hub says what failed first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightswitch.errors import Failure
from lightswitch.failures.classify import Rank, failure_of
from lightswitch.failures.stacks import ThreadPosition, thread_position
from lightswitch.failures.verdict import ANSWER_SECONDS, RankState, Timeouts, standstill, verdict

TIMEOUTS = Timeouts(lost_after_seconds=60, hung_after_seconds=1000)
WAITS = ThreadPosition("distributed.py:1 in all_reduce: wait()", True, 0)
WORKS = ThreadPosition("model.py:7 in step: f()", False, 0)
CLOSED = Failure("rank 0 failed: RuntimeError: Connection closed by peer", follows=True)
BUG = Failure("rank 1 failed: ValueError: a bug")


def _state(number: int, now: float, **told: object) -> RankState:
    return replace(RankState(Rank(number, 4, f"node{number // 2 + 1}", 100 + number), now, moved=now), **told)


@pytest.mark.parametrize("follows_first", [True, False])
def test_an_error_of_its_own_comes_before_one_that_follows(follows_first: bool) -> None:
    at = (1.0, 2.0) if follows_first else (2.0, 1.0)
    ranks = [_state(0, 2, failure=CLOSED, failed=at[0]), _state(1, 2, failure=BUG, failed=at[1])]
    assert verdict(ranks, 2, 2, TIMEOUTS) == BUG


def test_an_error_that_follows_waits_for_the_rank_it_follows_from() -> None:
    ranks = [_state(0, 2, failure=CLOSED, failed=2), _state(1, 2, position=WORKS), _state(2, 2), _state(3, 2)]
    assert verdict(ranks, 2, 3, TIMEOUTS) is None
    told = verdict(ranks, 2, 3 + ANSWER_SECONDS, TIMEOUTS)
    assert told is not None
    assert told.line.startswith("ranks 2, 3 on node2 were lost: nothing heard for 15 s")


def test_an_error_that_follows_from_nothing_is_the_first() -> None:
    ranks = [_state(0, 2, failure=CLOSED, failed=2), *(_state(number, 2, position=WORKS) for number in (1, 2, 3))]
    assert verdict(ranks, 2, 4, TIMEOUTS) == CLOSED


@pytest.mark.parametrize(
    ("gone", "oom_kills", "line"),
    [
        (
            [1],
            0,
            "rank 1 of 4 on node1 failed: process 101 ended without an error message: it was killed, or crashed ",
        ),
        ([1], 3, "rank 1 of 4 on node1 failed: process 101 was killed because node1 ran out of memory"),
        ([2, 3], 0, "node2 was lost: all its processes, ranks 2, 3, ended without an error message"),
    ],
)
def test_what_ended_without_a_message_is_named(gone: list[int], oom_kills: int, line: str) -> None:
    ranks = [
        _state(number, 2, gone=2.0 if number in gone else None, position=replace(WAITS, oom_kills=oom_kills))
        for number in range(4)
    ]
    assert verdict(ranks, 2, 2.1, TIMEOUTS) is None
    told = verdict(ranks, 2, 3, TIMEOUTS)
    assert told is not None
    assert told.line.startswith(line)


def test_of_a_hang_the_rank_is_blamed_that_waits_for_nobody() -> None:
    ranks = [_state(number, 1001, moved=0, progress=5, position=WORKS if number == 2 else WAITS) for number in range(4)]
    told = verdict(ranks, 1001, 1003, TIMEOUTS)
    assert told is not None
    assert told.line == f"rank 2 of 4 on node2 hangs at {WORKS.location}; no rank began a batch for 1000 s"
    assert told.details.splitlines() == [f"ranks 0, 1, 3 at {WAITS.location}", f"rank 2 at {WORKS.location}"]


ENTERED, LATE = {"0": 7, "3": 2}, {"0": 6, "3": 2}


@pytest.mark.parametrize(
    ("positions", "named"),
    [
        # NCCL goes on: nobody stands in a collective, and the others are not to be blamed for where they stand
        ([replace(WORKS, collectives=ENTERED), replace(WORKS, collectives=LATE)], 1),
        ([replace(WAITS, collectives=ENTERED), replace(WAITS, collectives=LATE)], 1),
        # of two that have not entered one, the first waits in another for the second
        ([replace(WAITS, collectives=LATE), replace(WORKS, collectives=LATE), replace(WAITS, collectives=ENTERED)], 1),
        # a group of others says nothing of a rank
        ([replace(WORKS, collectives={"1": 3}), replace(WAITS, collectives={"2": 9})], 0),
        # a rank whose interpreter is held by a call does not answer
        ([replace(WORKS, collectives=ENTERED), None], 1),
        # all have entered the same: where they stand decides
        ([replace(WAITS, collectives=ENTERED), replace(WORKS, collectives=ENTERED)], 1),
    ],
)
def test_of_a_hang_the_rank_is_blamed_that_has_not_entered_a_collective(
    positions: list[ThreadPosition | None], named: int
) -> None:
    ranks = [_state(number, 1001, moved=0, progress=5, position=at) for number, at in enumerate(positions)]
    told = verdict(ranks, 1001, 1002 + ANSWER_SECONDS, TIMEOUTS)
    assert told is not None
    assert told.line.startswith(f"rank {named} of 4 on ")


def test_a_rank_that_runs_ahead_of_its_device_is_not_blamed() -> None:
    ahead, behind = replace(WORKS, collectives=LATE), replace(WAITS, collectives=ENTERED)
    ranks = [
        _state(0, 1001, moved=0, progress=9, position=ahead),
        _state(1, 1001, moved=0, progress=5, position=behind),
    ]
    told = verdict(ranks, 1, 1003, TIMEOUTS)
    assert told is not None
    assert told.line.startswith("rank 1 of 4 on ")


def test_ranks_that_all_wait_at_different_lines_are_told_once_for_a_line() -> None:
    elsewhere = replace(WAITS, location="model.py:9 in training_step: self.log(), in barrier")
    ranks = [_state(number, 61, moved=0, position=elsewhere if number == 2 else WAITS) for number in range(12)]
    told = standstill(ranks, 61)
    assert told is not None
    first, *lines = told.splitlines()
    assert first.startswith("waiting    for 61 s without a batch: the ranks wait for one another")
    assert lines == [
        f"ranks 0, 1, 3, 4, 5, 6, 7, 8 and 3 more at {WAITS.location}",
        f"rank 2 at {elsewhere.location}",
    ]


@pytest.mark.parametrize("other", [WAITS, WORKS, None])
def test_ranks_are_not_told_to_wait_for_one_another_where_one_works_or_all_wait_at_one_line(
    other: ThreadPosition | None,
) -> None:
    assert standstill([_state(0, 61, position=WAITS), _state(1, 61, position=other)], 61) is None


def test_a_rank_left_alone_may_take_its_time() -> None:
    ranks = [_state(0, 5000, moved=0), *(_state(number, 9, left=True) for number in (1, 2, 3))]
    assert verdict(ranks, 5000, 5010, TIMEOUTS) is None


def test_errors_of_connections_are_taken_for_those_that_follow() -> None:
    rank = Rank(1, 2, "node1", 7)
    assert failure_of(rank, RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")).follows
    assert not failure_of(rank, ValueError("a bug")).follows


def test_a_position_names_the_line_of_the_code_that_called() -> None:
    assert "test_verdict.py" in thread_position().location
    assert not thread_position().waits
