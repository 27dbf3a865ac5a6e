"""The hub of the watch, in rank 0: hears each rank, and tells all of them what failed first."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from dataclasses import asdict
from typing import Any

from lightswitch.launch import processes
from lightswitch.launch.watch import sockets
from lightswitch.launch.watch.failure import Failure, Rank
from lightswitch.launch.watch.stacks import Stand
from lightswitch.launch.watch.verdict import Heard, Limits, suspicious, verdict

LONGEST_LINE_BYTES = 1 << 24  # of a message, which is one line of JSON
_TICK_SECONDS = 0.2


class Hub:
    """Runs in the event loop that it is opened in."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.token = secrets.token_hex(16)  # the port is open to the network: who has it not, is not heard
        self._ranks: dict[int, Heard] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._asked: float | None = None

    async def open(self) -> int:
        """The port, on every address of this node."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)
        sockets.keep_from_children(listener)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=LONGEST_LINE_BYTES)
        self._judging = asyncio.create_task(self._judge())
        return int(listener.getsockname()[1])

    async def all_left(self) -> None:
        """Until each rank has ended as it should; then the others may go, too."""
        while not all(rank.left for rank in self._ranks.values()):
            await asyncio.sleep(_TICK_SECONDS)
        self.close()

    def close(self) -> None:
        for writer in self._writers.values():
            _send(writer, over=True)
        self._judging.cancel()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readline()
        if self.token.encode() not in hello:
            writer.close()
            return
        sockets.keep_from_children(writer.get_extra_info("socket"))
        told = json.loads(hello)
        rank = Rank(**told["rank"])
        now = time.monotonic()
        heard = self._ranks[rank.number] = Heard(rank, now, moved=now, oom_kills=told["oom_kills"])
        self._writers[rank.number] = writer
        _send(writer, welcome=True)
        try:
            while line := await reader.readline():
                self._hear(heard, json.loads(line))
        except OSError:  # the node is gone, or the network
            pass
        if not heard.left:
            heard.gone = time.monotonic()
        writer.close()

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
                    rank.ended = rank.ended or processes.how_ended(rank.rank.pid)
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
