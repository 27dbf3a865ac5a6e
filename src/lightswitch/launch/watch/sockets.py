"""Loader workers are forked: with a rank's sockets open in them, too, nobody would notice that the rank has ended."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol


class _Socket(Protocol):
    def fileno(self) -> int:
        """-1 once it is closed."""
        ...


_open: list[_Socket] = []


def keep_from_children(socket: _Socket) -> None:
    _open.append(socket)


def _close() -> None:
    for socket in _open:
        if socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                os.close(socket.fileno())
    _open.clear()


os.register_at_fork(after_in_child=_close)
