"""The hub of the watchdog, in rank 0: it hears from each rank, and tells all of them the first failure."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightswitch.errors import Failure
from lightswitch.fault_tolerance.failure import Rank
from lightswitch.fault_tolerance.stacks import ThreadPosition
from lightswitch.fault_tolerance.watchdog.door import Door
from lightswitch.fault_tolerance.watchdog.sockets import OwnSockets
from lightswitch.fault_tolerance.watchdog.verdict import RankState, Timeouts, suspicious, verdict

LONGEST_LINE_BYTES = 1 << 20  # of a message, which is one line of JSON
_TICK_SECONDS = 0.2


class Hub:
    """The server that ranks send their progress to. It accepts no connection after every rank's.

    Args:
        how_ended: returns, in words, how a process that this one has started ended, by its id; None for any other.
        own: the sockets of this process.
    """

    def __init__(
        self, timeouts: Timeouts, world_size: int, how_ended: Callable[[int], str | None], own: OwnSockets
    ) -> None:
        self.timeouts = timeouts
        self.world_size = world_size
        self.door = Door(world_size, self._serve, own)
        self._how_ended = how_ended
        self._ranks: dict[int, RankState] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._asked: float | None = None

    async def open(self, listener: socket.socket) -> None:
        """Serve, and judge the ranks, in the running event loop."""
        self.door.open(listener)
        self._judging = asyncio.create_task(self._judge())

    async def all_left(self) -> None:
        """Wait until each rank has finished, then let all of them end."""
        while not all(rank.left for rank in self._ranks.values()):
            await asyncio.sleep(_TICK_SECONDS)
        self.close()

    def close(self) -> None:
        """Tell the ranks that the watchdog is over, and stop serving."""
        for writer in self._writers.values():
            _send(writer, over=True)
        self._judging.cancel()
        self.door.close()

    async def _serve(self, peer: socket.socket) -> None:
        """Read a rank's messages, of which the first says which rank it is."""
        reader, writer = await asyncio.open_connection(sock=peer, limit=LONGEST_LINE_BYTES)
        state: RankState | None = None
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if state is None:
                    state = self._welcome(message, writer)
                else:
                    self._hear(state, message)
        except (OSError, ValueError):  # the node or the network is gone, or the line is no message
            pass
        if state is not None and not state.left:
            state.gone = time.monotonic()
        writer.close()

    def _welcome(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> RankState:
        rank, now = Rank(**hello["rank"]), time.monotonic()
        state = self._ranks[rank.number] = RankState(rank, now, moved=now, oom_kills=hello["oom_kills"])
        self._writers[rank.number] = writer
        _send(writer, welcome=True)
        if len(self._ranks) == self.world_size:
            self.door.close()
        return state

    def _hear(self, state: RankState, message: dict[str, Any]) -> None:
        now = state.at = time.monotonic()
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
            now, ranks = time.monotonic(), self._ranks.values()
            if self._asked is None and suspicious(ranks, now, self.timeouts):
                self._asked = now
                for rank in ranks:
                    rank.position = None
                self._tell(ask=True)
            for rank in ranks:
                if rank.gone is not None:
                    rank.ended = rank.ended or self._how_ended(rank.rank.pid)
            if (failure := verdict(ranks, self._asked, now, self.timeouts)) is not None:
                self._tell(verdict=asdict(failure))
                return
            if self._asked is not None and not suspicious(ranks, now, self.timeouts):
                self._asked = None

    def _tell(self, **message: Any) -> None:
        for number, writer in self._writers.items():
            if not (self._ranks[number].left or self._ranks[number].gone):
                _send(writer, **message)


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
