"""A rank's side of the watchdog: a thread that sends progress to the hub, and ends the rank if the run has failed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from threading import Event, Thread, Timer
from typing import Any, TypeVar

from lightswitch.errors import Ended, Failure, Stopped
from lightswitch.fault_tolerance.failure import Rank, shortened
from lightswitch.fault_tolerance.stacks import oom_kills, thread_position
from lightswitch.fault_tolerance.watchdog import sockets
from lightswitch.fault_tolerance.watchdog.hub import LONGEST_LINE_BYTES, Hub
from lightswitch.fault_tolerance.watchdog.sockets import OwnSockets, Route
from lightswitch.fault_tolerance.watchdog.verdict import ANSWER_SECONDS, WITHOUT_MESSAGE, Timeouts
from lightswitch.process.state import Process

T = TypeVar("T")

_CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_GRACE_SECONDS = 10.0  # to end by itself: a checkpoint may be half-written, a logger's file not flushed


class Member:
    """A rank's connection to the hub, served by a thread of its own.

    Args:
        process: of this rank.
        answer: called with the first failure of the run, in another thread, before the rank is ended.
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
        Thread(target=self._loop.run_forever, name="watchdog", daemon=True).start()

    def open_hub(self, routes: Sequence[Route | None]) -> tuple[str | None, int, str]:
        """Open the hub in this rank; return its address (None: every one of this node), its port, and its token.

        Args:
            routes: from every other rank to this one.
        """
        listener, address = sockets.listen(routes)
        self._hub = Hub(self.timeouts, len(routes) + 1, self.process.how_ended, self._own)
        self._do(self._hub.open(listener))
        return address, listener.getsockname()[1], self._hub.door.token

    def join(self, first: Rank, address: str, port: int, token: str) -> None:
        """Connect to the hub, and send it progress from now on.

        Args:
            first: rank 0, where the hub is.

        Raises:
            OSError, TimeoutError: the hub can't be reached.
        """
        self._first = first
        self._do(self._join(address, port, token))

    def fail(self, failure: Failure) -> Failure:
        """Report this rank's failure, and return the first failure of the run, which may be another's."""
        self._do(self._say(failure=asdict(shortened(failure))))
        if not self._done.wait(2 * ANSWER_SECONDS):
            self._loop.call_soon_threadsafe(self._end, Failure(f"{self._first} was lost: it does not answer"))
            self._done.wait(ANSWER_SECONDS)
        return self.verdict or failure

    def leave(self) -> None:
        """End the watchdog, once the run is done. All ranks wait for the last: schedulers may kill ranks left over.

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

    def stop(self, stopped: Stopped) -> None:
        """Have all ranks end as this one does, by a signal that it alone may have received."""
        self.fail(Failure(f"stopped    by {stopped.by.name}", exit_code=stopped.exit_code, rank=self.rank.number))
        if self._timer is not None:  # this rank ends by itself
            self._timer.cancel()

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(2 * _CONNECT_SECONDS)

    async def _join(self, address: str, port: int, token: str) -> None:
        end = time.monotonic() + _CONNECT_SECONDS
        while not await self._is_welcome(address, port, token):  # dropped among too many strangers
            if time.monotonic() > end:
                raise ConnectionError(f"{address}:{port} does not answer as the watchdog does")
            await asyncio.sleep(_RETRY_SECONDS)
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
        with contextlib.suppress(OSError):  # `_listen` finds that the hub is gone
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        self._loop.call_later(0.1, self._loop.stop)  # once it is closed

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.timeouts.lost_after_seconds / 8)
            await self._say(progress=self.progress)

    async def _listen(self) -> None:
        lost = WITHOUT_MESSAGE
        silence_seconds = 1.5 * self.timeouts.lost_after_seconds  # where the network is cut, rank 0 speaks first
        try:
            while line := await asyncio.wait_for(self._reader.readline(), silence_seconds):
                message = json.loads(line)
                if "ask" in message:
                    await self._say(position=asdict(thread_position()), progress=self.progress)
                if "over" in message:
                    self._done.set()
                    return
                if "verdict" in message:
                    self._end(Failure(**message["verdict"]))
                    return
        except asyncio.TimeoutError:
            lost = f"was lost: nothing heard for {silence_seconds:g} s"
        except ConnectionResetError:  # as at the end of a process that has left something unread
            pass
        except OSError as error:
            lost = f"was lost: {error.strerror}"
        self._end(Failure(f"{self._first} failed: process {self._first.pid} {lost}"))

    def _end(self, failure: Failure) -> None:
        if self.verdict is not None:
            return
        self.verdict = failure
        self.process.has_failed.set()
        # whatever blocks, here or in the main thread
        self._timer = timer = Timer(_GRACE_SECONDS, self.process.leave_now, [failure.exit_code])
        timer.daemon = True
        timer.start()
        Thread(target=self._tell, name="crash report", daemon=True).start()  # in rank 0, this thread serves the hub

    def _tell(self) -> None:
        assert self.verdict is not None
        try:
            self._answer(self.verdict)
        finally:
            self._done.set()
