"""The sockets of the watch."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_SPARE_FILES = 1024  # beside a socket for each rank


class _Socket(Protocol):
    def fileno(self) -> int:
        """-1 once it is closed."""
        ...


class OwnSockets:
    """Sockets of a rank, kept from what it forks: with them open in a loader worker, nobody would notice that the rank
    has ended."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        os.register_at_fork(after_in_child=self._close_in_child)

    def keep(self, own: _Socket) -> None:
        """Have it closed in children that are forked from now on."""
        self._open.add(own)

    def close(self, own: socket.socket) -> None:
        """Close it here, too."""
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
class Way:
    """How a rank reaches rank 0.

    Args:
        address: of rank 0, as seen from there.
        is_local: both are on one machine.
    """

    address: str
    is_local: bool


def way_to(address: str, port: int, timeout_seconds: float) -> Way | None:
    """As a connection to where the ranks have met goes; None where there is none."""
    try:
        with socket.create_connection((address, port), timeout_seconds) as there:
            peer, own = there.getpeername()[0], there.getsockname()[0]
    except OSError:
        return None
    return Way(peer, peer == own or peer.startswith("127."))


def listen(ways: Sequence[Way | None]) -> tuple[socket.socket, str | None]:
    """A socket at the one address of this node that all ranks can reach, and that address; None where it is every one.

    Args:
        ways: of every other rank to this one.
    """
    backlog = max(128, len(ways))  # all may come at once
    _allow_files(len(ways) + _SPARE_FILES)
    remote = {way.address for way in ways if way and not way.is_local}
    if None not in ways and len(remote) < 2:
        address = remote.pop() if remote else "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):  # not an address of this node, as where it is translated on the way
            return socket.create_server((address, 0), family=family, backlog=backlog), address
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=backlog), None


def _allow_files(count: int) -> None:
    """Many systems give a process 1024, unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
