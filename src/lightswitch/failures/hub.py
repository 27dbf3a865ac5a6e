"""The watchdog's hub in rank 0: it receives each rank's messages, decides which rank failed first, and notifies all.

Connections without the run's token are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightswitch.errors import Failure
from lightswitch.failures.classify import Rank, shortened
from lightswitch.failures.stacks import ThreadPosition
from lightswitch.failures.verdict import (
    ANSWER_SECONDS,
    RankState,
    Timeouts,
    idle_seconds,
    present_ranks,
    standstill,
    suspicious,
    verdict,
)

log = logging.getLogger(__name__)

LONGEST_LINE_BYTES = 1 << 20  # of a message: a message is one line of JSON
_TICK_SECONDS = 0.2
_SPARE_STRANGERS = 256  # unauthenticated connections beyond one per rank; above this limit, the oldest is dropped
TOKEN_SECONDS = 10.0
_PAUSE_SECONDS = 0.001  # between accepted connections above that limit: training runs in this process too
_SPARE_FILES = 1024  # file descriptors beyond one socket per rank

_LOOK_SECONDS = 60.0  # without a batch begun, after which the hub looks whether the ranks wait for one another


class Hub:
    """Server to which the ranks send their progress. It stops accepting connections once all ranks have joined.

    Args:
        how_ended: takes a process ID and returns, in words, how that child of this process ended; None while it runs,
            and for any process that this one did not start.
        own: the watchdog's sockets in this process.
    """

    def __init__(
        self, timeouts: Timeouts, world_size: int, how_ended: Callable[[int], str | None], own: OwnSockets
    ) -> None:
        self.timeouts = timeouts
        self.world_size = world_size
        self.auth = Authenticator(world_size, self._serve, own)
        self._how_ended = how_ended
        self._ranks: dict[int, RankState] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._clock = Clock(timeouts)
        self._asked: float | None = None
        self._look_after = self._first_look = min(_LOOK_SECONDS, timeouts.hung_after_seconds / 4)

    async def open(self, listener: socket.socket) -> None:
        """Start serving and checking the ranks in the running event loop."""
        self.auth.open(listener)
        self._judging = asyncio.create_task(self._judge())

    async def all_left(self) -> None:
        """Wait until every rank has finished, then let all of them end."""
        while not all(rank.left for rank in self._ranks.values()):
            await asyncio.sleep(_TICK_SECONDS)
        self.close()

    def close(self) -> None:
        """Notify the ranks that the watchdog ends, and stop serving."""
        for writer in self._writers.values():
            _send(writer, over=True)
        self._judging.cancel()
        self.auth.close()

    async def _serve(self, peer: socket.socket) -> None:
        """Read a rank's messages; the first one identifies the rank."""
        reader, writer = await asyncio.open_connection(sock=peer, limit=LONGEST_LINE_BYTES)
        state: RankState | None = None
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if state is None:
                    state = self._welcome(message, writer)
                else:
                    self._hear(state, message)
        except (OSError, ValueError):  # the node or the network is down, or the line is not a message
            pass
        finally:
            if state is not None and not state.left:
                state.gone = self._clock.now()
            writer.close()

    def _welcome(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> RankState:
        rank, now = Rank(**hello["rank"]), self._clock.now()
        state = self._ranks[rank.number] = RankState(rank, now, moved=now, oom_kills=hello["oom_kills"])
        self._writers[rank.number] = writer
        _send(writer, welcome=True)
        if len(self._ranks) == self.world_size:
            self.auth.close()
        return state

    def _hear(self, state: RankState, message: dict[str, Any]) -> None:
        now = state.at = self._clock.now()
        if (progress := message.get("progress", state.progress)) != state.progress:
            state.progress, state.moved = progress, now
        if "position" in message:
            state.position = ThreadPosition(**message["position"])
        if "failure" in message:
            state.failure, state.failed = Failure(**message["failure"]), now
        state.left = state.left or "leaves" in message
        _send(self._writers[state.rank.number], heard=True)

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now, ranks = self._clock.now(), self._ranks.values()
            idle = idle_seconds(ranks, now)
            if idle < self._first_look:
                self._look_after = self._first_look
            if self._asked is None and (suspicious(ranks, now, self.timeouts) or idle > self._look_after):
                self._asked = now
                for rank in ranks:
                    rank.position = None
                self._send_to_all(ask=True)
            for rank in ranks:
                if rank.gone is not None:
                    rank.ended = rank.ended or self._how_ended(rank.rank.pid)
            if (failure := verdict(ranks, self._asked, now, self.timeouts)) is not None:
                self._send_to_all(verdict=asdict(shortened(failure)))
                return
            if self._asked is not None and not suspicious(ranks, now, self.timeouts):
                self._look(present_ranks(ranks), idle, is_late=now - self._asked > ANSWER_SECONDS)

    def _look(self, present: Sequence[RankState], seconds: float, is_late: bool) -> None:
        """Log once, from the answers of the ranks, that they wait for one another; look again at twice the time."""
        if seconds >= self._first_look:
            if not is_late and any(rank.position is None for rank in present):
                return
            if (notice := standstill(present, seconds)) is not None:
                log.warning("%s", notice)
            self._look_after = 2 * seconds
        self._asked = None

    def _send_to_all(self, **message: Any) -> None:
        for number, writer in self._writers.items():
            if not (self._ranks[number].left or self._ranks[number].gone):
                _send(writer, **message)


class Clock:
    """Clock of a process that stops with it: the time for which a process was suspended is nobody's silence.

    The watchdog reads it every few seconds at least, so a longer pause between two readings is a suspension.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._longest_seconds = timeouts.lost_after_seconds / 4
        self._read, self._seconds = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds for which this process has run."""
        before, self._read = self._read, time.monotonic()
        self._seconds += min(self._read - before, self._longest_seconds)
        return self._seconds


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


class Authenticator:
    """Listener that passes on connections that send the run's token, and drops all others.

    Args:
        world_size: number of ranks, which may all connect at once.
        admit: called with each connection that has sent the token; the bytes after the token are not yet read.
        own: the watchdog's sockets in this process; each connection is added to them.
    """

    def __init__(
        self, world_size: int, admit: Callable[[socket.socket], Coroutine[Any, Any, None]], own: OwnSockets
    ) -> None:
        self.token = secrets.token_hex(16)
        self._most_strangers = world_size + _SPARE_STRANGERS
        self._admit = admit
        self._own = own
        self._strangers: dict[asyncio.Task[bool], asyncio.TimerHandle] = {}  # oldest first, with their timeouts
        self._admitted: set[asyncio.Task[None]] = set()

    def open(self, listener: socket.socket) -> None:
        """Start accepting connections in the running event loop."""
        listener.setblocking(False)
        self._own.keep(listener)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting connections, and drop those that have not sent the token."""
        self._accepting.cancel()
        for stranger in list(self._strangers):
            stranger.cancel()
        self._own.close(self._listener)

    async def _accept(self) -> None:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # the peer has disconnected, or this process has too many open files
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._hear(peer)
            await asyncio.sleep(_PAUSE_SECONDS if self._is_crowded() else 0)  # the tasks read arrived tokens
            if self._is_crowded():
                next(iter(self._strangers)).cancel()

    def _hear(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._own.keep(peer)
        stranger = asyncio.create_task(self._has_token(peer))
        self._strangers[stranger] = asyncio.get_running_loop().call_later(TOKEN_SECONDS, stranger.cancel)
        stranger.add_done_callback(functools.partial(self._decide, peer))

    def _is_crowded(self) -> bool:
        return len(self._strangers) > self._most_strangers

    def _decide(self, peer: socket.socket, stranger: asyncio.Task[bool]) -> None:
        self._strangers.pop(stranger).cancel()
        if stranger.cancelled() or stranger.exception() or not stranger.result():
            self._own.close(peer)
            return
        admitted = asyncio.create_task(self._admit(peer))
        self._admitted.add(admitted)
        admitted.add_done_callback(self._admitted.discard)

    async def _has_token(self, peer: socket.socket) -> bool:
        """Read exactly as many bytes as the token has, and compare them with it."""
        shown = b""
        while len(shown) < len(self.token):
            if not (more := await asyncio.get_running_loop().sock_recv(peer, len(self.token) - len(shown))):
                return False
            shown += more
        return hmac.compare_digest(shown, self.token.encode())


class _Socket(Protocol):
    def fileno(self) -> int:
        """Return the file descriptor; -1 once the socket is closed."""
        ...


class OwnSockets:
    """Sockets of a rank, closed in the processes that it forks: a copy in a loader worker would hide the rank's end."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        os.register_at_fork(after_in_child=self._close_in_child)

    def keep(self, own: _Socket) -> None:
        """Register a socket to be closed in processes that are forked from now on."""
        self._open.add(own)

    def close(self, own: socket.socket) -> None:
        """Close a socket in this process."""
        self._open.discard(own)
        with contextlib.suppress(OSError):
            own.close()

    def _close_in_child(self) -> None:
        for inherited in self._open:
            if inherited.fileno() >= 0:
                with contextlib.suppress(OSError):
                    os.close(inherited.fileno())
        self._open.clear()


@dataclass(frozen=True)
class Route:
    """Address at which a rank reaches rank 0.

    Args:
        address: of rank 0, as seen from this rank.
        is_local: whether both ranks are on the same machine.
    """

    address: str
    is_local: bool


def route_to(address: str, port: int, timeout_seconds: float) -> Route | None:
    """Return the route of a connection to the rendezvous store; None if the connection fails."""
    try:
        with socket.create_connection((address, port), timeout_seconds) as there:
            peer, own = there.getpeername()[0], there.getsockname()[0]
    except OSError:
        return None
    return Route(peer, peer == own or peer.startswith("127."))


def listen(routes: Sequence[Route | None]) -> tuple[socket.socket, str | None]:
    """Listen at the address of this node that all ranks can reach; return the socket and the address.

    If there is no single such address, the socket listens at all addresses, and the returned address is None.

    Args:
        routes: from every other rank to this one.
    """
    backlog = max(128, len(routes))  # all ranks may connect at once
    _allow_files(len(routes) + _SPARE_FILES)
    remote = {route.address for route in routes if route and not route.is_local}
    if None not in routes and len(remote) < 2:
        address = remote.pop() if remote else "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):  # the network translates it (NAT): not an address of this node
            return socket.create_server((address, 0), family=family, backlog=backlog), address
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=backlog), None


def _allow_files(count: int) -> None:
    """Raise the limit on open files, 1024 by default on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
