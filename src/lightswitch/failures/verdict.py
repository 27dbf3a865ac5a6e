"""The rules by which the hub decides which rank failed first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightswitch.errors import Failure
from lightswitch.failures.classify import Rank
from lightswitch.failures.stacks import ThreadPosition

_SETTLE_SECONDS = 0.5  # the hub learns one by one of ranks that end together
ANSWER_SECONDS = 15.0  # for a live rank to answer: on a busy machine, or while a call holds Python's lock
WITHOUT_MESSAGE = "ended without an error message: it was killed, or crashed outside of Python"


@dataclass(frozen=True)
class Timeouts:
    """The times after which a silent rank, or a run without progress, has failed.

    Args:
        lost_after_seconds: a rank that sends nothing for so long is lost: its node, or the network to it.
        hung_after_seconds: a run in which no rank begins a batch for so long hangs. It must be shorter than the timeout
            of the process group, after which torch ends the ranks that wait, not the one they wait for.
    """

    lost_after_seconds: float
    hung_after_seconds: float


@dataclass
class RankState:
    """A rank's state as the hub knows it; times are in seconds of the hub's monotonic clock."""

    rank: Rank
    at: float  # of the last message
    progress: int = 0  # batches begun
    moved: float = 0  # when `progress` last changed
    oom_kills: int = 0  # on its node, when it joined
    failure: Failure | None = None
    failed: float = 0
    gone: float | None = None  # when its socket was closed without a message
    ended: str | None = None  # how it ended, in words, if this process started it
    left: bool = False  # it has finished
    position: ThreadPosition | None = None  # as it has answered since it was asked


def suspicious(ranks: Collection[RankState], now: float, timeouts: Timeouts) -> bool:
    """Return whether it is time to ask each rank for its position in the code."""
    return any(rank.failure or rank.gone is not None for rank in ranks) or _hang(ranks, now, timeouts)


def verdict(ranks: Collection[RankState], asked: float | None, now: float, timeouts: Timeouts) -> Failure | None:
    """Return the first failure once it is known; a rank's own error at once, unless it may follow from another's.

    Args:
        asked: when the ranks were asked for their positions; None if they were not.
    """
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failed)
    for rank in failed:
        if rank.failure and not rank.failure.follows:
            return rank.failure
    gone = [rank for rank in ranks if rank.gone is not None]
    if gone and now - min(rank.gone or now for rank in gone) > _SETTLE_SECONDS:
        return _died(gone, ranks)
    present = [rank for rank in ranks if not rank.left and rank.gone is None]
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


def _hang(ranks: Collection[RankState], now: float, timeouts: Timeouts) -> bool:
    """Return whether the run hangs: a rank left alone, as to export the weights, keeps no other waiting."""
    moved = [rank.moved for rank in ranks if not rank.left and rank.gone is None]
    return len(moved) > 1 and now - max(moved) > timeouts.hung_after_seconds


def _died(gone: Sequence[RankState], ranks: Collection[RankState]) -> Failure:
    first = min(gone, key=lambda rank: rank.gone or 0)
    whole = [rank for rank in ranks if rank.rank.node == first.rank.node]
    how = first.ended or WITHOUT_MESSAGE
    lacks_memory = any(rank.position and rank.position.oom_kills > rank.oom_kills for rank in whole)
    if lacks_memory:
        how = f"was killed, as {first.rank.node} ran out of memory"
    if len(whole) > 1 and all(rank in gone for rank in whole):
        return Failure(
            f"{first.rank.node} was lost: all its processes, {_numbers(whole)}, ended without an error message"
        )
    return Failure(f"{first.rank} failed: process {first.rank.pid} {how}", lacks_memory=lacks_memory)


def _lost(silent: Sequence[RankState], seconds: float) -> Failure:
    first = silent[0]
    who = str(first.rank) if len(silent) == 1 else f"{_numbers(silent)} on {_nodes(silent)}"
    are = "was" if len(silent) == 1 else "were"
    return Failure(f"{who} {are} lost: nothing heard for {seconds:g} s; the node or the network to it may be down")


def _hangs(present: Sequence[RankState], seconds: float) -> Failure:
    """Return the failure of the first rank to blame: behind the others in batches, then collectives, and not waiting.

    A criterion that fits none of the remaining ranks is skipped.
    """
    fewest = min(rank.progress for rank in present)
    blamed = [rank for rank in present if rank.progress == fewest]
    blamed = _late(blamed, present) or blamed
    blamed = [rank for rank in blamed if rank.position is None or not rank.position.waits] or blamed
    line = f"{blamed[0].rank} hangs{_location(blamed[0])}; no rank began a batch for {seconds:g} s"
    return Failure(line, "\n".join(f"{rank.rank}{_location(rank)}" for rank in present) if len(present) > 1 else "")


def _late(some: Sequence[RankState], present: Sequence[RankState]) -> list[RankState]:
    """Return those of some ranks that have entered fewer collectives of a process group than another of its ranks.

    A rank that has not reported counts as having entered none.
    """
    most: dict[str, int] = {}
    for rank in present:
        for group, count in (rank.position.collectives if rank.position else {}).items():
            most[group] = max(count, most.get(group, 0))

    def is_late(rank: RankState) -> bool:
        position = rank.position
        return position is None or any(count < most[group] for group, count in position.collectives.items())

    return [rank for rank in some if is_late(rank)]


def _location(rank: RankState) -> str:
    return f" at {rank.position.location}" if rank.position else " and does not say where"


def _numbers(ranks: Sequence[RankState]) -> str:
    return "ranks " + ", ".join(str(rank.rank.number) for rank in ranks)


def _nodes(ranks: Sequence[RankState]) -> str:
    return ", ".join(dict.fromkeys(rank.rank.node for rank in ranks))
