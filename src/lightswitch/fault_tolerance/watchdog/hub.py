"""The hub of the watch, in rank 0: hears each rank, and tells all of them what failed first."""

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
from lightswitch.fault_tolerance.stacks import Stand
from lightswitch.fault_tolerance.watchdog.door import Door
from lightswitch.fault_tolerance.watchdog.sockets import OwnSockets
from lightswitch.fault_tolerance.watchdog.verdict import Heard, Limits, suspicious, verdict

LONGEST_LINE_BYTES = 1 << 20  # of a message, which is one line of JSON
_TICK_SECONDS = 0.2


class Hub:
    """Runs in the event loop that it is opened in. Nobody can connect any more once every rank has.

    Args:
        how_ended: tells, in words, how a process that this one has started ended, by its id; None for any other.
        own: the sockets of this process.
    """

    def __init__(
        self, limits: Limits, world_size: int, how_ended: Callable[[int], str | None], own: OwnSockets
    ) -> None:
        self.limits = limits
        self.world_size = world_size
        self.door = Door(world_size, self._serve, own)
        self._how_ended = how_ended
        self._ranks: dict[int, Heard] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._asked: float | None = None

    async def open(self, listener: socket.socket) -> None:
        self.door.open(listener)
        self._judging = asyncio.create_task(self._judge())

    async def all_left(self) -> None:
        """Until each rank has ended as it should; then the others may go, too."""
        while not all(rank.left for rank in self._ranks.values()):
            await asyncio.sleep(_TICK_SECONDS)
        self.close()

    def close(self) -> None:
        for writer in self._writers.values():
            _send(writer, over=True)
        self._judging.cancel()
        self.door.close()

    async def _serve(self, peer: socket.socket) -> None:
        """A rank, whose first line says which one it is."""
        reader, writer = await asyncio.open_connection(sock=peer, limit=LONGEST_LINE_BYTES)
        heard: Heard | None = None
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if heard is None:
                    heard = self._welcome(message, writer)
                else:
                    self._hear(heard, message)
        except (OSError, ValueError):  # the node is gone, or the network; or it is no message
            pass
        if heard is not None and not heard.left:
            heard.gone = time.monotonic()
        writer.close()

    def _welcome(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> Heard:
        rank, now = Rank(**hello["rank"]), time.monotonic()
        heard = self._ranks[rank.number] = Heard(rank, now, moved=now, oom_kills=hello["oom_kills"])
        self._writers[rank.number] = writer
        _send(writer, welcome=True)
        if len(self._ranks) == self.world_size:
            self.door.close()
        return heard

    def _hear(self, heard: Heard, message: dict[str, Any]) -> None:
        now = heard.at = time.monotonic()
        if (progress := message.get("progress", heard.progress)) != heard.progress:
            heard.progress, heard.moved = progress, now
        if "stand" in message:
            heard.stand = Stand(**message["stand"])
        if "failure" in message:
            heard.failure, heard.failed = Failure(**message["failure"]), now
        heard.left = heard.left or "leaves" in message
        _send(self._writers[heard.rank.number], heard=True)

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now, ranks = time.monotonic(), self._ranks.values()
            if self._asked is None and suspicious(ranks, now, self.limits):
                self._asked = now
                for rank in ranks:
                    rank.stand = None
                self._tell(ask=True)
            for rank in ranks:
                if rank.gone is not None:
                    rank.ended = rank.ended or self._how_ended(rank.rank.pid)
            if (failure := verdict(ranks, self._asked, now, self.limits)) is not None:
                self._tell(verdict=asdict(failure))
                return
            if self._asked is not None and not suspicious(ranks, now, self.limits):
                self._asked = None

    def _tell(self, **message: Any) -> None:
        for number, writer in self._writers.items():
            if not (self._ranks[number].left or self._ranks[number].gone):
                _send(writer, **message)


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
