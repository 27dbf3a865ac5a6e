"""Which rank failed first: the rules, on what the hub has heard of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightswitch.errors import Failure
from lightswitch.fault_tolerance.failure import Rank
from lightswitch.fault_tolerance.stacks import Stand

_SETTLE_SECONDS = 0.5  # ranks that end together are heard of one after the other
ANSWER_SECONDS = 5.0  # for a rank that lives to say so
WITHOUT_A_WORD = "ended without a word: it was killed, or crashed outside of Python"


@dataclass(frozen=True)
class Limits:
    """
    Args:
        lost_after_seconds: without a word of a rank, it is lost: its node, or the network to it.
        hung_after_seconds: without a batch begun anywhere, the run hangs. Shorter than the time-out of the process
            group, after which torch ends the ranks that wait, and not the one they wait for.
    """

    lost_after_seconds: float
    hung_after_seconds: float


@dataclass
class Heard:
    """What the hub knows of a rank; times are of its clock, in seconds."""

    rank: Rank
    at: float  # the last word
    progress: int = 0  # batches begun
    moved: float = 0  # when `progress` last changed
    oom_kills: int = 0  # of its node, at first
    failure: Failure | None = None
    failed: float = 0
    gone: float | None = None  # its socket was closed, without a word
    ended: str | None = None  # how, where this process started it
    left: bool = False  # it has ended as it should
    stand: Stand | None = None  # since it was asked


def suspicious(ranks: Collection[Heard], now: float, limits: Limits) -> bool:
    """Time to ask each rank where it stands."""
    return any(rank.failure or rank.gone is not None for rank in ranks) or _hang(ranks, now, limits)


def verdict(ranks: Collection[Heard], asked: float | None, now: float, limits: Limits) -> Failure | None:
    """The first failure, once it is known; a rank's own error is known at once, unless it may follow from another's.

    Args:
        asked: when each rank was asked where it stands.
    """
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failed)
    for rank in failed:
        if rank.failure and not rank.failure.follows:
            return rank.failure
    gone = [rank for rank in ranks if rank.gone is not None]
    if gone and now - min(rank.gone or now for rank in gone) > _SETTLE_SECONDS:
        return _died(gone, ranks)
    present = [rank for rank in ranks if not rank.left and rank.gone is None]
    silent = [rank for rank in present if now - rank.at > limits.lost_after_seconds]
    if silent:
        return _lost(silent, limits.lost_after_seconds)
    if asked is None:
        return None
    mute = [rank for rank in present if rank.stand is None and rank.failure is None]
    if now - asked < (ANSWER_SECONDS if mute else 2 * _SETTLE_SECONDS):
        return None
    if failed:
        return _lost(mute, ANSWER_SECONDS) if mute else failed[0].failure
    return _hangs(present, limits.hung_after_seconds) if _hang(ranks, now, limits) else None


def _hang(ranks: Collection[Heard], now: float, limits: Limits) -> bool:
    """A rank that is left alone, to export what was trained, keeps nobody waiting."""
    moved = [rank.moved for rank in ranks if not rank.left and rank.gone is None]
    return len(moved) > 1 and now - max(moved) > limits.hung_after_seconds


def _died(gone: Sequence[Heard], ranks: Collection[Heard]) -> Failure:
    first = min(gone, key=lambda rank: rank.gone or 0)
    whole = [rank for rank in ranks if rank.rank.node == first.rank.node]
    told = first.ended or WITHOUT_A_WORD
    if any(rank.stand and rank.stand.oom_kills > rank.oom_kills for rank in whole):
        told = f"was killed, as {first.rank.node} ran out of memory"
    if len(whole) > 1 and all(rank in gone for rank in whole):
        return Failure(f"{first.rank.node} was lost: all its processes, {_numbers(whole)}, ended without a word")
    return Failure(f"{first.rank} failed: process {first.rank.pid} {told}")


def _lost(silent: Sequence[Heard], seconds: float) -> Failure:
    first = silent[0]
    who = str(first.rank) if len(silent) == 1 else f"{_numbers(silent)} on {_nodes(silent)}"
    are = "was" if len(silent) == 1 else "were"
    return Failure(f"{who} {are} lost: nothing heard for {seconds:g} s; the node or the network to it may be down")


def _hangs(present: Sequence[Heard], seconds: float) -> Failure:
    """Those behind that do not wait for others; where a device works ahead of Python, all that are behind."""
    behind = min(rank.progress for rank in present)
    last = [rank for rank in present if rank.progress == behind]
    blamed = [rank for rank in last if rank.stand is None or not rank.stand.waits] or last
    told = [f"{rank.rank} hangs{_place(rank)}" for rank in blamed]
    line = f"{told[0]}; no rank began a batch for {seconds:g} s"
    return Failure(line, "\n".join(f"{rank.rank}{_place(rank)}" for rank in present) if len(present) > 1 else "")


def _place(rank: Heard) -> str:
    return f" at {rank.stand.place}" if rank.stand else " and does not say where"


def _numbers(ranks: Sequence[Heard]) -> str:
    return "ranks " + ", ".join(str(rank.rank.number) for rank in ranks)


def _nodes(ranks: Sequence[Heard]) -> str:
    return ", ".join(dict.fromkeys(rank.rank.node for rank in ranks))
