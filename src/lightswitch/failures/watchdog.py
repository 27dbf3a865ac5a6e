"""The watchdog over the ranks of a run: if one fails, hangs or is lost, all end soon, with a message that names it.

A thread in each rank communicates with the hub in rank 0 (hub.py) over a separate socket: the process group's store
and collectives may block forever when a rank fails. The rules are pure functions in verdict.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from threading import Event, Thread, Timer
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.context import RunContext
from lightswitch.errors import Ended, ExitCode, Failure, Stopped
from lightswitch.failures import classify, crash_report
from lightswitch.failures.classify import Rank, node_name, shortened
from lightswitch.failures.crash_report import CrashReport
from lightswitch.failures.hub import LONGEST_LINE_BYTES, Clock, Hub, OwnSockets, Route, listen, route_to
from lightswitch.failures.stacks import oom_kills, thread_position
from lightswitch.failures.verdict import ANSWER_SECONDS, WITHOUT_MESSAGE, Timeouts
from lightswitch.process import Process, stopped_with
from lightswitch.runs import starts

log = logging.getLogger(__name__)
_REACH_SECONDS = 10.0
T = TypeVar("T")
_CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_VERDICT_SECONDS = 5.0  # to wait for the hub's verdict after ANSWER_SECONDS
_PARTING_SECONDS = 1.0  # for the other ranks to disconnect at the end of the run
_GRACE_SECONDS = 10.0  # for a rank to end by itself: it may be writing a checkpoint or a logger's file


class Watchdog(Callback):
    """Callback that joins the watchdog, counts the batches begun, and reports an error before the teardown.

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
        self.report = CrashReport(run)
        self.batch = batch
        self.timeouts = timeouts
        self.advise = advise
        self._own: Failure | None = None
        self._oom_kills = oom_kills()
        self._trainer: Trainer

    def join(self, trainer: Trainer) -> None:
        """Connect this rank to the hub. Collective: call it once the process group exists, before user code."""
        self._trainer = trainer
        if self._member is not None:
            return
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        member = Member(rank, self.timeouts, self.run.process, self._answer)
        strategy: Any = trainer.strategy
        environment = strategy.cluster_environment
        self.run.process.hosts[:], routes = _hosts_and_routes(trainer, environment.main_address, environment.main_port)
        at = (rank, *member.open_hub(routes), self.report.folder) if trainer.is_global_zero else None
        first, address, port, token, self.run.process.crash_folder = strategy.broadcast(at)
        try:
            member.join(first, address or environment.main_address, port, token)
        except (OSError, TimeoutError) as error:
            log.warning("%s can't reach the watchdog in rank 0, and runs without it: %s", rank, error)
            return
        self.run.process.join_watchdog(member)
        if isinstance(strategy, PortableCheckpoints):
            strategy.has_lost_a_rank = self.run.process.has_lost_a_rank

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._moved()  # preparing the data may take long

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Stopped) and self.run.signals.is_deferred:  # all ranks have agreed to stop
            self.run.process.leave_watchdog()
        elif isinstance(exception, Stopped):
            self.run.process.stop_all_ranks(exception)
        elif self._member is not None and not isinstance(exception, Ended):
            self.failure(exception, trainer)
        elif trainer.world_size == 1:
            self._report(exception, trainer)  # launch/ending does the rest, and Python prints the traceback

    def failure(self, error: BaseException, trainer: Trainer) -> Failure:
        """Report this rank's error to the hub, and return the run's first failure, which may be another rank's."""
        member = self._member
        if member is None:
            return self._report(error, trainer)
        self._own = self._failure(error, member.rank)
        return member.fail(self._own)

    @property
    def _member(self) -> Member | None:
        watchdog = self.run.process.watchdog
        return watchdog if isinstance(watchdog, Member) else None

    def _report(self, error: BaseException, trainer: Trainer) -> Failure:
        """Write the crash report of a rank that has no connection to the hub, and return its failure."""
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        own = self._failure(error, rank)
        if own.lacks_memory:
            own = replace(own, line=f"{own.line}\n{self.advise(trainer)}")
        if own.exit_code == ExitCode.FAILED:
            self._note_reached(trainer)
            crash_report.add_report(error, own, rank, self.batch.describe_position(trainer), self.report)
        return own

    def _note_reached(self, trainer: Trainer) -> None:
        if trainer.training:
            starts.note_reached(self.run.run_dir, trainer.global_step)

    def _failure(self, error: BaseException, rank: Rank) -> Failure:
        own = classify.failure(error, self.cfg, rank, self.run.process.steps_have_begun.is_set())
        if own.exit_code == ExitCode.FAILED and classify.worker_was_killed(error) and oom_kills() > self._oom_kills:
            return replace(own, line=f"{own.line}; {rank.node} ran out of memory")
        return own

    def on_train_batch_start(self, *_: Any) -> None:
        self._step()

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            self._moved()
        else:
            self._step()

    def on_test_batch_start(self, *_: Any) -> None:
        self._step()

    def on_predict_batch_start(self, *_: Any) -> None:
        self._step()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._moved()

    def _step(self) -> None:
        if not self.run.process.steps_have_begun.is_set():  # `set` takes a lock; avoid that in each step
            self.run.process.steps_have_begun.set()
        self._moved()

    def _moved(self) -> None:
        if (member := self._member) is not None:
            member.progress += 1

    def _answer(self, failure: Failure) -> None:
        member = self._member
        assert member is not None
        if failure.signal is not None:
            self.run.signals.end_by(Stopped(signal.Signals(failure.signal)))
        crash_report.write_for_torchrun(failure)
        if failure.exit_code == ExitCode.FAILED:
            self._note_reached(self._trainer)
            advice = f"{self.advise(self._trainer)}\n" if failure.lacks_memory else ""
            self.report.print_failure(replace(failure, details=advice + failure.details))
            self.report.add_rank(member.rank, self.batch.describe_position(self._trainer), self._own)
        elif failure.rank == member.rank.number and not (self.run.is_first and stopped_with(failure.exit_code)):
            self.run.process.note_failure(failure.line)
            print(failure.line, file=sys.stderr, flush=True)
            self.report.log_details(failure.details)


def _hosts_and_routes(trainer: Trainer, address: str, port: int) -> tuple[list[str], list[Route | None]]:
    """Return the host name of every node, and the route from every other rank to rank 0. Collective."""
    of_ranks: list[Any] = [None] * trainer.world_size
    own = None if trainer.is_global_zero else route_to(address, port, _REACH_SECONDS)
    torch.distributed.all_gather_object(of_ranks, (node_name(), trainer.local_rank, own))
    return [host for host, local_rank, _ in of_ranks if local_rank == 0], [route for *_, route in of_ranks[1:]]


class Member:
    """A rank's connection to the hub, served by a separate thread.

    Args:
        process: of this rank.
        answer: called with the run's first failure, in another thread, before this rank ends.
    """

    def __init__(self, rank: Rank, timeouts: Timeouts, process: Process, answer: Callable[[Failure], None]) -> None:
        self.rank = rank
        self.process = process
        self._own = OwnSockets()
        self.timeouts = timeouts
        self.progress = 0  # batches begun
        self.verdict: Failure | None = None
        self._answer = answer
        self._done = Event()
        self._hub: Hub | None = None
        self._timer: Timer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="watchdog", daemon=True)
        self._thread.start()

    def open_hub(self, routes: Sequence[Route | None]) -> tuple[str | None, int, str]:
        """Open the hub in this rank; return its address (None: all addresses of this node), its port and its token.

        Args:
            routes: from every other rank to this one.
        """
        listener, address = listen(routes)
        self._hub = Hub(self.timeouts, len(routes) + 1, self.process.how_ended, self._own)
        self._do(self._hub.open(listener))
        return address, listener.getsockname()[1], self._hub.auth.token

    def join(self, first: Rank, address: str, port: int, token: str) -> None:
        """Connect to the hub, and start sending this rank's progress to it.

        Args:
            first: rank 0, which runs the hub.

        Raises:
            OSError, TimeoutError: the hub can't be reached.
        """
        self._first = first
        self._do(self._join(address, port, token))

    def fail(self, failure: Failure) -> Failure:
        """Report this rank's failure, and return the run's first failure, which may be another rank's."""
        self._do(self._say(failure=asdict(shortened(failure))))
        if not self._done.wait(ANSWER_SECONDS + _VERDICT_SECONDS):
            self._loop.call_soon_threadsafe(self._end, Failure(f"{self._first} was lost: it does not answer"))
            self._done.wait(_VERDICT_SECONDS)
        return self.verdict or failure

    def leave(self) -> None:
        """End the watchdog at the end of the run. All ranks wait for the last: schedulers may kill the remaining ranks.

        Raises:
            Ended: the run has failed.
        """
        self._do(self._say(leaves=True, progress=self.progress))
        if self._hub is not None:
            asyncio.run_coroutine_threadsafe(self._hub.all_left(), self._loop)
        self._done.wait()
        if self.verdict is not None:
            raise Ended(self.verdict.exit_code)
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def stop(self, stopped: Stopped) -> None:
        """End all ranks for a signal that possibly only this rank has received."""
        line = f"stopped    by {stopped.by.name}"
        self.fail(Failure(line, exit_code=stopped.exit_code, rank=self.rank.number, signal=stopped.by))
        if self._timer is not None:  # this rank ends by itself
            self._timer.cancel()

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(2 * _CONNECT_SECONDS)

    async def _join(self, address: str, port: int, token: str) -> None:
        end = time.monotonic() + _CONNECT_SECONDS
        while not await self._is_welcome(address, port, token):  # dropped among too many strangers
            if time.monotonic() > end:
                raise ConnectionError(f"no answer from the watchdog at {address}:{port}")
            await asyncio.sleep(_RETRY_SECONDS)
        self._clock, self._heard = Clock(self.timeouts), 0.0
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    async def _is_welcome(self, address: str, port: int, token: str) -> bool:
        opened = asyncio.open_connection(address, port, limit=LONGEST_LINE_BYTES)
        self._reader, self._writer = await asyncio.wait_for(opened, _CONNECT_SECONDS)
        self._own.keep(self._writer.get_extra_info("socket"))
        self._writer.write(token.encode())
        await self._say(rank=asdict(self.rank), oom_kills=oom_kills())
        with contextlib.suppress(OSError):
            if await asyncio.wait_for(self._reader.readline(), _CONNECT_SECONDS):
                return True
        self._writer.close()
        return False

    async def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # `_listen` detects that the hub is unreachable
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def _close(self) -> None:
        """Disconnect, and end all tasks: Python warns of tasks left pending when the loop has stopped."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, pending = await asyncio.wait(others, timeout=_PARTING_SECONDS)
            for task in pending:  # of ranks that have not hung up
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _beat(self) -> None:
        silence_seconds = 1.5 * self.timeouts.lost_after_seconds  # if the network fails, rank 0 reports first
        while True:
            await asyncio.sleep(self.timeouts.lost_after_seconds / 8)
            if self._clock.now() - self._heard > silence_seconds:
                self._lose(f"was lost: nothing heard for {silence_seconds:g} s")
            await self._say(progress=self.progress)

    async def _listen(self) -> None:
        lost = WITHOUT_MESSAGE
        try:
            while line := await self._reader.readline():
                self._heard = self._clock.now()
                message = json.loads(line)
                if "ask" in message:
                    await self._say(position=asdict(thread_position()), progress=self.progress)
                if "over" in message:
                    self._done.set()
                    return
                if "verdict" in message:
                    self._end(Failure(**message["verdict"]))
                    return
        except ConnectionResetError:  # the other process ended with unread data in its socket
            pass
        except OSError as error:
            lost = f"was lost: {error.strerror}"
        except ValueError as error:
            lost = f"has sent what is no message: {error}"
        self._lose(lost)

    def _lose(self, how: str) -> None:
        self._end(Failure(f"{self._first} failed: process {self._first.pid} {how}"))

    def _end(self, failure: Failure) -> None:
        if self.verdict is not None:
            return
        self.verdict = failure
        self.process.has_failed.set()
        if failure.rank is None:  # no rank has raised it
            self.process.has_lost_a_rank.set()
        # ends the process even if this thread or the main thread blocks
        self._timer = timer = Timer(_GRACE_SECONDS, self.process.leave_now, [failure.exit_code])
        timer.daemon = True
        timer.start()
        # in a separate thread: in rank 0, this thread serves the hub
        Thread(target=self._report_verdict, name="crash report", daemon=True).start()

    def _report_verdict(self) -> None:
        assert self.verdict is not None
        try:
            self._answer(self.verdict)
        finally:
            self._done.set()
