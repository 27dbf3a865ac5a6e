"""The way into the hub: who connects shows the run's token first, and nothing else of a stranger is kept."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable

from lightswitch.launch.watch import sockets

MOST_STRANGERS = 256  # connections that have not shown the token; of more, the oldest is dropped
PATIENCE_SECONDS = 10.0
_BREATH_SECONDS = 0.001  # between strangers where there are too many: training shares this process


class Door:
    """
    Args:
        admit: called with the connection of each who has the token; the bytes after it are still to be read.
    """

    def __init__(self, admit: Callable[[socket.socket], Awaitable[None]]) -> None:
        self.token = secrets.token_hex(16)
        self._admit = admit
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._admitted: set[asyncio.Task[None]] = set()

    def open(self, listener: socket.socket) -> None:
        """In the running event loop."""
        listener.setblocking(False)
        sockets.keep_from_children(listener)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """To all who are still outside."""
        self._accepting.cancel()
        for stranger in list(self._strangers):
            stranger.cancel()
        sockets.close(self._listener)

    async def _accept(self) -> None:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # it is gone again, or this process has too many files open
                await asyncio.sleep(_BREATH_SECONDS)
                continue
            peer.setblocking(False)
            sockets.keep_from_children(peer)
            stranger = asyncio.create_task(self._receive(peer))
            self._strangers[stranger] = None
            await asyncio.sleep(_BREATH_SECONDS if self._is_crowded() else 0)  # a token that is there is read meanwhile
            if self._is_crowded():
                next(iter(self._strangers)).cancel()

    def _is_crowded(self) -> bool:
        return len(self._strangers) > MOST_STRANGERS

    async def _receive(self, peer: socket.socket) -> None:
        stranger = asyncio.current_task()
        assert stranger is not None
        limit = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, stranger.cancel)
        try:
            has_token = await self._has_token(peer)
        except (OSError, asyncio.CancelledError):
            has_token = False
        finally:
            limit.cancel()
            del self._strangers[stranger]
        if has_token:
            self._admitted.add(stranger)
            stranger.add_done_callback(self._admitted.discard)
            await self._admit(peer)
        else:
            sockets.close(peer)

    async def _has_token(self, peer: socket.socket) -> bool:
        """Read no byte beyond it."""
        shown = b""
        while len(shown) < len(self.token):
            if not (more := await asyncio.get_running_loop().sock_recv(peer, len(self.token) - len(shown))):
                return False
            shown += more
        return hmac.compare_digest(shown, self.token.encode())
