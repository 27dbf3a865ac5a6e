"""The watchdog over the ranks of a run: if one fails, hangs or is lost, all end soon, with a message that names it.

Two threads in each rank use the store of the process group, over connections of their own: the main thread may block
in a collective for ever. Each rank keeps a report there (batches begun, its position in the code, its error, which
ranks of its node have ended); rank 0 reads all reports, decides by the rules of `verdict`, and gives one order, by
which all ranks end. Rank 0 serves the store, so a rank whose connection to it closes knows that rank 0 has ended.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from threading import Event, Lock, Thread, Timer
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store

from lightswitch.batches.callback import GlobalBatch
from lightswitch.collectives import of_ranks
from lightswitch.context import RunContext
from lightswitch.errors import Ended, ExitCode, Failure, Stopped
from lightswitch.failures import classify, crash_report
from lightswitch.failures.classify import Rank, is_of_engine, is_of_others, node_name, oom_kills, shortened
from lightswitch.failures.crash_report import CrashReport
from lightswitch.process import WITHOUT_MESSAGE, Process, stopped_with

_SETTLE_SECONDS = 0.5  # ranks that end together are found one by one
ANSWER_SECONDS = 15.0  # within which a live rank reports, even on a busy machine or while a call holds the GIL
_MOST_NUMBERS = 8  # of ranks in a message
_TICK_SECONDS = 0.25
_BEAT_SECONDS = 2.0  # between reports, at most
_VERDICT_SECONDS = 5.0  # to wait for the verdict after ANSWER_SECONDS
_PARTING_SECONDS = 5.0  # for the other ranks to read rank 0's order, before the store ends with it
_GRACE_SECONDS = 10.0  # for a rank to end by itself: it may be writing a checkpoint or a logger's file
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/", "/torch/cuda/")  # for other ranks


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


class Watchdog:
    """The watchdog as the callback of a run sees it: joins it, counts the batches begun, and reports an error.

    A run of one process has no watchdog, only a crash report.

    Args:
        advise: returns what to try next after memory has run out.
    """

    def __init__(
        self,
        cfg: DictConfig,
        run: RunContext,
        batch: GlobalBatch,
        timeouts: Timeouts,
        advise: Callable[[Trainer], str],
    ) -> None:
        self.cfg = cfg
        self.run = run
        self.crash = CrashReport(run)
        self.batch = batch
        self.timeouts = timeouts
        self.advise = advise
        self._own: Failure | None = None
        self._member: Member | None = None
        self._trainer: Trainer

    def join(self, trainer: Trainer) -> None:
        """Start watching. Collective: call it once the process group exists, before user code."""
        self._trainer = trainer
        if self._member is not None:
            return
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
        member = Member(rank, self.timeouts, self.run.process, self._answer)
        everyone = of_ranks((rank, namespace, trainer.local_rank, self.crash.folder))
        mates = [one for one, other, *_ in everyone if (one.node, other) == (rank.node, namespace) and one != rank]
        self.run.process.hosts[:] = [one.node for one, _, local_rank, _ in everyone if local_rank == 0]
        self.run.process.crash_folder = everyone[0][3]
        member.start([one for one, *_ in everyone], mates)
        self._member = member
        self.run.process.join_watchdog(member)

    def report(self, error: BaseException, trainer: Trainer) -> None:
        """Report what ends the Trainer, before the teardown."""
        if isinstance(error, Stopped) and self.run.signals.is_deferred:  # all ranks have agreed to stop
            self.run.process.leave_watchdog()
        elif isinstance(error, Stopped):
            self.run.process.stop_all_ranks(error)
        elif self._member is not None and not isinstance(error, Ended):
            self._own = self._failure(error, self._member.rank)
            self._member.fail(self._own)
        elif trainer.world_size == 1:
            self._report(error, trainer)  # launch/ending does the rest, and Python prints the traceback

    def _report(self, error: BaseException, trainer: Trainer) -> None:
        """Write the crash report of a run of one process."""
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        own = self._failure(error, rank)
        if own.lacks_memory:
            own = replace(own, line=f"{own.line}\n{self.advise(trainer)}")
        if own.exit_code == ExitCode.FAILED:
            crash_report.add_report(error, own, rank, self.batch.describe_position(trainer), self.crash)

    def _failure(self, error: BaseException, rank: Rank) -> Failure:
        return classify.failure(error, self.cfg, rank, self.run.process.steps_have_begun.is_set())

    def begin_batch(self, is_step: bool) -> None:
        """Count a batch; with its first step, a run has begun."""
        if is_step and not self.run.process.steps_have_begun.is_set():  # `set` takes a lock; avoid that in each step
            self.run.process.steps_have_begun.set()
        if self._member is not None:
            self._member.progress += 1

    def _answer(self, failure: Failure) -> None:
        member = self._member
        assert member is not None
        if failure.signal is not None:
            self.run.signals.end_by(Stopped(signal.Signals(failure.signal)))
        if failure.exit_code == ExitCode.FAILED:
            advice = f"{self.advise(self._trainer)}\n" if failure.lacks_memory else ""
            self.crash.print_failure(replace(failure, details=advice + failure.details))
            self.crash.add_rank(member.rank, self.batch.describe_position(self._trainer), self._own)
        elif failure.rank == member.rank.number and not (self.run.is_first and stopped_with(failure.exit_code)):
            self.run.process.note_failure(failure.line)
            print(failure.line, file=sys.stderr, flush=True)
            self.crash.log_details(failure.details)


class Member:
    """A rank's part in the watchdog. Its report is in the store from the beginning.

    Args:
        process: of this rank.
        answer: called with the run's first failure, in another thread, before this rank ends.
    """

    def __init__(self, rank: Rank, timeouts: Timeouts, process: Process, answer: Callable[[Failure], None]) -> None:
        self.rank = rank
        self.process = process
        self.progress = 0  # batches begun
        self.verdict: Failure | None = None
        self._timeouts = timeouts
        self._answer = answer
        self._oom_kills = oom_kills()
        self._is_over = Event()
        self._is_done = Event()
        self._beats = 0
        self._timer: Timer | None = None
        self._writing, self._ending = Lock(), Lock()
        self._gone: dict[int, tuple[str, bool]] = {}  # ranks of this node whose processes have ended, and how
        self._report: dict[str, Any] = {}
        self._judge: Judge | None = None
        self._store = _connection()
        self._say()

    def start(self, ranks: Sequence[Rank], mates: Sequence[Rank]) -> None:
        """Start watching, once every rank has a report.

        Args:
            ranks: all ranks, in order.
            mates: the other ranks of this node, whose processes this one can see.
        """
        self._first, self._mates = ranks[0], mates
        if self.rank == self._first:
            self._judge = Judge(ranks, self._timeouts, self._store)
        self._threads = [
            Thread(target=self._follow, name="watchdog", daemon=True),
            Thread(target=self._watch, name="watchdog's clock", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def fail(self, failure: Failure) -> Failure:
        """Report this rank's failure, and return the run's first failure, which may be another rank's."""
        self._say(failure=asdict(shortened(failure)))
        if not self._is_done.wait(ANSWER_SECONDS + _VERDICT_SECONDS):
            self._lose("was lost: it does not answer")
            self._is_done.wait(_VERDICT_SECONDS)
        return self.verdict or failure

    def leave(self) -> None:
        """End the watchdog at the end of the run. All ranks wait for the last: schedulers may kill the remaining ranks.

        Raises:
            Ended: the run has failed.
        """
        self._say(left=True)
        self._is_done.wait()
        if self.verdict is not None:
            raise Ended(self.verdict.exit_code)
        for thread in self._threads:
            thread.join()

    def stop(self, stopped: Stopped) -> None:
        """End all ranks for a signal that possibly only this rank has received."""
        line = f"stopped    by {stopped.by.name}"
        self.fail(Failure(line, exit_code=stopped.exit_code, rank=self.rank.number, signal=stopped.by))
        if self._timer is not None:  # this rank ends by itself
            self._timer.cancel()

    def _say(self, **news: Any) -> None:
        """Write this rank's report, with some news."""
        with self._writing:
            self._report |= {"beats": self._beats, "progress": self.progress, "gone": self._gone} | news
            with contextlib.suppress(DistError):  # `_follow` detects that the store is gone
                self._store.set(str(self.rank.number), json.dumps(self._report))

    def _follow(self) -> None:
        """Send reports, and follow the order of rank 0. Blocks while rank 0 is stopped or cut off."""
        store = _connection()
        beat_seconds = min(_BEAT_SECONDS, self._timeouts.lost_after_seconds / 8)
        beat_at, gone = 0.0, self._gone
        try:
            while not self._is_over.wait(_TICK_SECONDS):
                if time.monotonic() > beat_at + beat_seconds or gone is not self._gone:
                    beat_at, gone = time.monotonic(), self._gone
                    self._beats += 1
                    self._say(position=asdict(position()))
                if not store.check(["order"]):  # a wait would log each time that it is over
                    continue
                order = json.loads(store.get("order"))
                self._is_over.set()
                store.add("heard", 1)
                if order is None:
                    self._part()
                else:
                    self._end(Failure(**order))
        except DistError:
            self._lose(WITHOUT_MESSAGE)

    def _watch(self) -> None:
        """Look every moment at the processes of this node, and for a sign of rank 0; in rank 0, judge all ranks.

        Never waits for the store of another process.
        """
        silence_seconds = 1.5 * self._timeouts.lost_after_seconds  # if the network fails, rank 0 reports first
        now = heard_at = 0.0
        before, beats = time.monotonic(), 0
        while not self._is_over.wait(_TICK_SECONDS):
            # the time for which this process was suspended is nobody's silence
            now += min(time.monotonic() - before, self._timeouts.lost_after_seconds / 4)
            before = time.monotonic()
            for mate in self._mates:
                if mate.number not in self._gone and (how := self.process.how_ended(mate.pid)):
                    self._gone = {**self._gone, mate.number: (how, oom_kills() > self._oom_kills)}
            if self._judge is not None:
                try:
                    self._judge.judge(now)
                except DistError:  # this process ends
                    return
            elif self._first.number in self._gone:
                self._lose(WITHOUT_MESSAGE)
            if self._beats != beats:
                beats, heard_at = self._beats, now
            elif now - heard_at > silence_seconds:
                self._lose(f"was lost: nothing heard for {silence_seconds:g} s")

    def _lose(self, how: str) -> None:
        self._end(Failure(f"{self._first} failed: process {self._first.pid} {how}"))

    def _end(self, failure: Failure) -> None:
        with self._ending:
            if self.verdict is not None or self._is_done.is_set():
                return
            self.verdict = failure
        self._is_over.set()
        self.process.has_failed.set()
        # ends the process even if this thread or the main thread blocks
        self._timer = timer = Timer(_GRACE_SECONDS, self.process.leave_now, [failure.exit_code])
        timer.daemon = True
        timer.start()
        Thread(target=self._report_verdict, name="crash report", daemon=True).start()

    def _report_verdict(self) -> None:
        assert self.verdict is not None
        try:
            self._answer(self.verdict)
        finally:
            self._part()

    def _part(self) -> None:
        """Let the main thread go on; in rank 0, once the other ranks have read its order."""
        end = time.monotonic() + _PARTING_SECONDS
        if self._judge is not None:
            while self._store.add("heard", 0) < self._judge.present_count and time.monotonic() < end:
                time.sleep(_TICK_SECONDS / 5)
        self._is_done.set()


class Judge:
    """Rank 0's view of all ranks, from which it decides.

    Args:
        store: has every rank's report.
    """

    def __init__(self, ranks: Sequence[Rank], timeouts: Timeouts, store: PrefixStore) -> None:
        self._states = [RankState(rank, at=0.0) for rank in ranks]
        self._reports = [b""] * len(ranks)
        self._timeouts = timeouts
        self._store = store
        self._has_ordered = False

    @property
    def present_count(self) -> int:
        """How many ranks have not ended without a word."""
        return sum(state.gone is None for state in self._states)

    def judge(self, now: float) -> None:
        """Read all reports, and order all ranks to end once they call for it: with the first failure, or with None.

        Args:
            now: in seconds.
        """
        if self._has_ordered:
            return
        self._read(now)
        failure = verdict(self._states, now, self._timeouts)
        if failure is not None or all(state.left for state in self._states):
            self._has_ordered = True
            self._store.set("order", json.dumps(failure and asdict(shortened(failure))))

    def _read(self, now: float) -> None:
        reports = self._store.multi_get([str(state.rank.number) for state in self._states])
        for state, before, report in zip(self._states, self._reports, reports, strict=True):
            if report == before:
                continue
            said, state.at = json.loads(report), now
            if said["progress"] != state.progress:
                state.progress, state.moved = said["progress"], now
            if "failure" in said and state.failure is None:
                state.failure, state.failed = Failure(**said["failure"]), now
            state.left = "left" in said
            state.position = Position(**said["position"]) if "position" in said else None
            for number, (how, lacks_memory) in said["gone"].items():
                other = self._states[int(number)]
                if other.left:
                    continue
                other.gone = now if other.gone is None else other.gone
                if how != WITHOUT_MESSAGE:  # only the process that started it knows how it ended
                    other.how = how
                other.lacks_memory |= lacks_memory
        self._reports = reports


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


def _connection() -> PrefixStore:
    """Return the process group's store over a new connection, so that no call waits for another thread's."""
    store: Any = _get_default_store()
    while not isinstance(store, TCPStore):
        store = store.underlying_store
    return PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]  # torch's stub lacks it


def position() -> Position:
    """Return the main thread's position. Can be called in any thread."""
    newest = sys._current_frames()[threading.main_thread().ident or 0]
    stack = [frame for frame, _ in traceback.walk_stack(newest)][::-1]
    files = [frame.f_code.co_filename for frame in stack]
    waits = any(part in files[-1] for part in _WAITING)
    entered = (at for at, file in enumerate(files) if is_of_engine(file) and file != __file__)
    within_run = stack[next(entered, 0) :]  # a script may have called the run
    at = ([frame for frame in within_run if not is_of_others(frame.f_code.co_filename)] or stack)[-1]
    code, line = at.f_code, at.f_lineno
    source = linecache.getline(code.co_filename, line).strip()
    within = f", in {newest.f_code.co_name}" if waits and at is not newest else ""
    return Position(f"{code.co_filename}:{line} in {code.co_name}: {source}{within}", waits)
