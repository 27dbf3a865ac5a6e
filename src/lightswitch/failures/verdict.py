"""The watchdog's rules: from what the ranks report, which one failed first, hangs, or waits for others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightswitch.errors import Failure
from lightswitch.failures.classify import Rank

_SETTLE_SECONDS = 0.5  # ranks that end together are found one by one
ANSWER_SECONDS = 15.0  # within which a live rank answers, even on a busy machine or while a call holds the GIL
_MOST_NUMBERS = 8  # of ranks in a message
WITHOUT_MESSAGE = "ended without an error message: it was killed, or crashed outside of Python"


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
        collectives: number of collectives that the rank has entered, by process group.
    """

    location: str
    waits: bool
    collectives: Mapping[str, int] = field(default_factory=dict)


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
    position: Position | None = None  # its answer to the last request


def suspicious(ranks: Collection[RankState], now: float, timeouts: Timeouts) -> bool:
    """Return whether to ask the ranks for their positions in the code."""
    return any(rank.failure or rank.gone is not None for rank in ranks) or _hang(ranks, now, timeouts)


def verdict(ranks: Collection[RankState], asked: float | None, now: float, timeouts: Timeouts) -> Failure | None:
    """Return the first failure once it is known; None until then.

    A rank's reported error is returned at once, unless it may be the consequence of another rank's failure.

    Args:
        asked: when the ranks were asked for their positions; None if they were not.
    """
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failed)
    for rank in failed:
        if rank.failure and not rank.failure.follows:
            return rank.failure
    gone = [rank for rank in ranks if rank.gone is not None]
    if gone and now - min(rank.gone or now for rank in gone) > _SETTLE_SECONDS:
        return _died(min(gone, key=lambda rank: rank.gone or 0))
    present = present_ranks(ranks)
    silent = [rank for rank in present if now - rank.at > timeouts.lost_after_seconds]
    if silent:
        return _lost(silent, timeouts.lost_after_seconds)
    if asked is None:
        return None
    mute = [rank for rank in present if rank.position is None and rank.failure is None]
    if now - asked < (ANSWER_SECONDS if mute else 2 * _SETTLE_SECONDS):
        return None
    if failed:
        return _lost(mute, ANSWER_SECONDS) if mute else failed[0].failure
    return _hangs(present, timeouts.hung_after_seconds) if _hang(ranks, now, timeouts) else None


def present_ranks(ranks: Collection[RankState]) -> list[RankState]:
    """Return the ranks that have neither finished nor gone, in order of their numbers."""
    there = (rank for rank in ranks if not rank.left and rank.gone is None)
    return sorted(there, key=lambda state: state.rank.number)


def idle_seconds(ranks: Collection[RankState], now: float) -> float:
    """Return for how long no rank has begun a batch; 0 for a single remaining rank, which may export the weights."""
    moved = [rank.moved for rank in present_ranks(ranks)]
    return now - max(moved) if len(moved) > 1 else 0.0


def _hang(ranks: Collection[RankState], now: float, timeouts: Timeouts) -> bool:
    return idle_seconds(ranks, now) > timeouts.hung_after_seconds


def _died(first: RankState) -> Failure:
    how = f"was killed because {first.rank.node} ran out of memory" if first.lacks_memory else first.how
    return Failure(f"{first.rank} failed: process {first.rank.pid} {how}", lacks_memory=first.lacks_memory)


def _lost(silent: Sequence[RankState], seconds: float) -> Failure:
    first = silent[0]
    who = str(first.rank) if len(silent) == 1 else f"{_numbers(silent)} on {_nodes(silent)}"
    are = "was" if len(silent) == 1 else "were"
    return Failure(f"{who} {are} lost: nothing heard for {seconds:g} s; the node or the network to it may be down")


def _hangs(present: Sequence[RankState], seconds: float) -> Failure:
    """Return the failure that blames one rank: the first with the fewest batches, late in collectives, and not waiting.

    The criteria apply in this order; a criterion that no remaining rank meets is skipped.
    """
    fewest = min(rank.progress for rank in present)
    blamed = [rank for rank in present if rank.progress == fewest]
    blamed = _late(blamed, present) or blamed
    blamed = [rank for rank in blamed if rank.position is None or not rank.position.waits] or blamed
    line = f"{blamed[0].rank} hangs{_location(blamed[0])}; no rank began a batch for {seconds:g} s"
    return Failure(line, _lines_of(present) if len(present) > 1 else "")


def _late(some: Sequence[RankState], present: Sequence[RankState]) -> list[RankState]:
    """Return those of `some` that have entered fewer collectives of a process group than another rank.

    A rank that has not reported its position counts as late.
    """
    most: dict[str, int] = {}
    for rank in present:
        for group, count in (rank.position.collectives if rank.position else {}).items():
            most[group] = max(count, most.get(group, 0))

    def is_late(rank: RankState) -> bool:
        position = rank.position
        return position is None or any(count < most[group] for group, count in position.collectives.items())

    return [rank for rank in some if is_late(rank)]


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
