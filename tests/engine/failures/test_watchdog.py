"""Ranks watch one another through the store of their process group."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightswitch.errors import Failure
from lightswitch.failures.classify import Rank
from lightswitch.failures.watchdog import Member, Timeouts
from lightswitch.process import Process
from tests.pool import Pool

BUG = Failure("rank 1 of 2 on node2 failed: ValueError: a bug", rank=1)


def verdicts(pool: Pool, function: Callable[[], Failure | None]) -> list[str | None]:
    return [failure and failure.line for failure in pool(2)(function)]


@contextmanager
def member(lost_after_seconds: float = 60, is_silent: bool = False) -> Iterator[Member]:
    """This rank's part in a watchdog over two ranks, each on a node of its own."""
    dist.init_process_group("gloo")
    number = dist.get_rank()
    rank = Rank(number, 2, f"node{number + 1}", os.getpid())
    timeouts = Timeouts(lost_after_seconds, hung_after_seconds=1000)
    found = Member(rank, timeouts, Process(), lambda failure: None)
    everyone = [rank, rank]
    dist.all_gather_object(everyone, rank)
    if not is_silent:
        found.start(everyone, [])
    yield found
    found._is_over.set()  # otherwise it takes the end of the group for that of rank 0, and ends this process
    for thread in () if is_silent else found._threads:
        thread.join()
    if found._timer is not None:
        found._timer.cancel()
    dist.barrier()


def test_a_rank_that_says_nothing_any_more_is_lost(pool: Pool) -> None:
    lost = "rank 1 of 2 on node2 was lost: nothing heard for 2 s; the node or the network to it may be down"
    assert verdicts(pool, _says_nothing) == [lost, None]


def _says_nothing() -> Failure | None:
    with member(lost_after_seconds=2, is_silent=os.environ["RANK"] == "1") as own:
        if own.rank.number == 0:
            own._is_done.wait(60)
        return own.verdict


def test_all_ranks_learn_of_the_first_failure(pool: Pool) -> None:
    assert verdicts(pool, _fails) == [BUG.line, BUG.line]


def _fails() -> Failure | None:
    with member() as own:
        if own.rank.number == 1:
            own.fail(BUG)
        own._is_done.wait(60)
        return own.verdict


def test_ranks_leave_together(pool: Pool) -> None:
    early, late = pool(2)(_leaves)
    assert early > late + 0.5


def _leaves() -> float:
    """Return for how long this rank has waited for the other."""
    with member() as own:
        time.sleep(1.5 * own.rank.number)
        start = time.monotonic()
        own.leave()
        return time.monotonic() - start


def test_rank_0_that_is_stopped_is_lost(pool: Pool) -> None:
    """Calls of its store never return."""
    stopped, told = verdicts(pool, _rank_0_is_stopped)
    assert stopped is None
    assert re.fullmatch(r"rank 0 of 2 on node1 failed: process \d+ was lost: nothing heard for 3 s", told or "")


def _rank_0_is_stopped() -> Failure | None:
    with member(lost_after_seconds=2) as own:
        pids = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        if own.rank.number == 1:
            os.kill(pids[0], signal.SIGSTOP)
            own._is_done.wait(60)
            os.kill(pids[0], signal.SIGCONT)
        return own.verdict


def test_a_suspension_of_all_ranks_is_no_silence(pool: Pool) -> None:
    assert verdicts(pool, _is_suspended) == [None, None]


def _is_suspended() -> Failure | None:
    with member(lost_after_seconds=4) as own:  # a busy machine may let a rank wait for a second or two
        pids = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        if own.rank.number == 0:
            both = " ".join(map(str, pids))
            subprocess.Popen(["sh", "-c", f"kill -STOP {both}; sleep 6; kill -CONT {both}"])
        time.sleep(7.5)
        own.leave()
        return own.verdict
