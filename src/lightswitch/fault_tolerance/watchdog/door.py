"""Authentication at the hub: connections without the run's token are dropped."""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from lightswitch.fault_tolerance.watchdog.sockets import OwnSockets

_SPARE_STRANGERS = 256  # connections without the token so far, beside one a rank; of more, the oldest is dropped
PATIENCE_SECONDS = 10.0
_BREATH_SECONDS = 0.001  # between strangers if there are too many: training shares this process


class Door:
    """A listener that admits connections which send the run's token, and reads no other byte of them.

    Args:
        world_size: of the run, whose ranks may all connect at once.
        admit: called with each connection that has sent the token; the bytes after it are still to be read.
        own: the sockets of this process, to which each connection is added.
    """

    def __init__(
        self, world_size: int, admit: Callable[[socket.socket], Coroutine[Any, Any, None]], own: OwnSockets
    ) -> None:
        self.token = secrets.token_hex(16)
        self._most_strangers = world_size + _SPARE_STRANGERS
        self._admit = admit
        self._own = own
        self._strangers: dict[asyncio.Task[bool], asyncio.TimerHandle] = {}  # the oldest first
        self._admitted: set[asyncio.Task[None]] = set()

    def open(self, listener: socket.socket) -> None:
        """Accept connections, in the running event loop."""
        listener.setblocking(False)
        self._own.keep(listener)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections, and drop those that have not sent the token."""
        self._accepting.cancel()
        for stranger in list(self._strangers):
            stranger.cancel()
        self._own.close(self._listener)

    async def _accept(self) -> None:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # the peer is gone, or this process has too many files open
                await asyncio.sleep(_BREATH_SECONDS)
                continue
            self._hear(peer)
            await asyncio.sleep(_BREATH_SECONDS if self._is_crowded() else 0)  # tokens that are there are read now
            if self._is_crowded():
                next(iter(self._strangers)).cancel()

    def _hear(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._own.keep(peer)
        stranger = asyncio.create_task(self._has_token(peer))
        self._strangers[stranger] = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, stranger.cancel)
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
        """Read as many bytes as the token has, and no more."""
        shown = b""
        while len(shown) < len(self.token):
            if not (more := await asyncio.get_running_loop().sock_recv(peer, len(self.token) - len(shown))):
                return False
            shown += more
        return hmac.compare_digest(shown, self.token.encode())
