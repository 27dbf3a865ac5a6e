"""The watchdog's rules: from what the ranks report, which one failed first, hangs, or waits for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightswitch.errors import Failure
from lightswitch.failures.classify import Rank
from lightswitch.process import WITHOUT_MESSAGE

_SETTLE_SECONDS = 0.5  # ranks that end together are found one by one
ANSWER_SECONDS = 15.0  # within which a live rank reports, even on a busy machine or while a call holds the GIL
_MOST_NUMBERS = 8  # of ranks in a message


@dataclass(frozen=True)
class Timeouts:
    """Times after which a silent rank, or a run without progress, counts as failed.

    Args:
        lost_after_seconds: after so many seconds without a message, a rank is lost: its node or network is down.
        hung_after_seconds: after so many seconds in which no rank begins a batch, the run hangs. It must be shorter
            than the process group's timeout, after which torch ends the waiting ranks, not the rank they wait for.
    """

    lost_after_seconds: float
    hung_after_seconds: float


@dataclass(frozen=True)
class Position:
    """Where a rank's main thread is.

    Args:
        location: file, line, function and source line, of the user's code if the stack has any.
        waits: whether it is in code of torch that may wait for other ranks.
    """

    location: str
    waits: bool


@dataclass
class RankState:
    """State of a rank as known to rank 0; times are in seconds of rank 0's clock."""

    rank: Rank
    at: float  # when its report last changed
    progress: int = 0  # batches begun
    moved: float = 0  # when `progress` last changed
    failure: Failure | None = None
    failed: float = 0
    gone: float | None = None  # when its process was found to have ended
    how: str = WITHOUT_MESSAGE  # its process ended, in words
    lacks_memory: bool = False  # whether its node has killed processes for lack of memory
    left: bool = False  # it has finished
    position: Position | None = None  # in its last report; None before the first


def verdict(ranks: Sequence[RankState], now: float, timeouts: Timeouts) -> Failure | None:
    """Return the first failure once it is known; None until then.

    A rank's reported error is returned at once, unless it may be the consequence of another rank's failure. Then all
    other ranks have to show first that they are alive.
    """
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failed)
    for rank in failed:
        if rank.failure and not rank.failure.follows:
            return rank.failure
    gone = [rank for rank in ranks if rank.gone is not None]
    if gone and now - min(rank.gone or now for rank in gone) > _SETTLE_SECONDS:
        return _died(min(gone, key=lambda rank: rank.gone or 0))
    present = [rank for rank in ranks if not rank.left and rank.gone is None]
    silent = [rank for rank in present if now - rank.at > timeouts.lost_after_seconds]
    if silent:
        return _lost(silent, timeouts.lost_after_seconds)
    if failed:
        first = failed[0]
        mute = [rank for rank in present if rank.failure is None and rank.at <= first.failed]
        if now - first.failed < (ANSWER_SECONDS if mute else 2 * _SETTLE_SECONDS):
            return None
        return _lost(mute, ANSWER_SECONDS) if mute else first.failure
    moved = [rank.moved for rank in present]  # a single remaining rank may take its time, to export the weights
    hangs = len(moved) > 1 and now - max(moved) > timeouts.hung_after_seconds
    return _hangs(present, timeouts.hung_after_seconds) if hangs else None


def _died(first: RankState) -> Failure:
    how = f"was killed because {first.rank.node} ran out of memory" if first.lacks_memory else first.how
    return Failure(f"{first.rank} failed: process {first.rank.pid} {how}", lacks_memory=first.lacks_memory)


def _lost(silent: Sequence[RankState], seconds: float) -> Failure:
    first = silent[0]
    who = str(first.rank) if len(silent) == 1 else f"{_numbers(silent)} on {_nodes(silent)}"
    are = "was" if len(silent) == 1 else "were"
    return Failure(f"{who} {are} lost: nothing heard for {seconds:g} s; the node or the network to it may be down")


def _hangs(present: Sequence[RankState], seconds: float) -> Failure:
    """Return the failure that blames one rank: the first with the fewest batches that does not wait for others."""
    fewest = min(rank.progress for rank in present)
    blamed = [rank for rank in present if rank.progress == fewest]
    blamed = [rank for rank in blamed if rank.position is None or not rank.position.waits] or blamed
    line = f"{blamed[0].rank} hangs{_location(blamed[0])}; no rank began a batch for {seconds:g} s"
    return Failure(line, _lines_of(present) if len(present) > 1 else "")


def _lines_of(ranks: Sequence[RankState]) -> str:
    """Return a line for each line of code that ranks are at, with their numbers."""
    at: dict[str, list[RankState]] = {}
    for rank in ranks:
        at.setdefault(_location(rank), []).append(rank)
    return "\n".join(f"{_numbers(some)}{location}" for location, some in at.items())


def _location(rank: RankState) -> str:
    return f" at {rank.position.location}" if rank.position else " (position unknown)"


def _numbers(ranks: Sequence[RankState]) -> str:
    shown = ", ".join(str(rank.rank.number) for rank in ranks[:_MOST_NUMBERS])
    more = f" and {len(ranks) - _MOST_NUMBERS} more" if len(ranks) > _MOST_NUMBERS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _nodes(ranks: Sequence[RankState]) -> str:
    return ", ".join(dict.fromkeys(rank.rank.node for rank in ranks))
