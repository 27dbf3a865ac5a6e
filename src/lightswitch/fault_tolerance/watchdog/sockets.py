"""Sockets of the watchdog: the hub's listener, the route to it, and what forked processes must close."""

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
        """Return the descriptor; -1 once it is closed."""
        ...


class OwnSockets:
    """Sockets of a rank, closed in the processes that it forks: open in a loader worker, they would hide its end."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        os.register_at_fork(after_in_child=self._close_in_child)

    def keep(self, own: _Socket) -> None:
        """Have a socket closed in children that are forked from now on."""
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
    """The address by which a rank reaches rank 0.

    Args:
        address: of rank 0, as this rank sees it.
        is_local: whether both are on one machine.
    """

    address: str
    is_local: bool


def route_to(address: str, port: int, timeout_seconds: float) -> Route | None:
    """Return the route that a connection to the store of the ranks takes; None if it can't be made."""
    try:
        with socket.create_connection((address, port), timeout_seconds) as there:
            peer, own = there.getpeername()[0], there.getsockname()[0]
    except OSError:
        return None
    return Route(peer, peer == own or peer.startswith("127."))


def listen(routes: Sequence[Route | None]) -> tuple[socket.socket, str | None]:
    """Listen at the one address of this node that all ranks reach; return the socket, and the address.

    The address is None if there is no such one, and the socket listens at all addresses.

    Args:
        routes: from every other rank to this one.
    """
    backlog = max(128, len(routes))  # all may connect at once
    _allow_files(len(routes) + _SPARE_FILES)
    remote = {route.address for route in routes if route and not route.is_local}
    if None not in routes and len(remote) < 2:
        address = remote.pop() if remote else "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):  # not an address of this node: translated by the network
            return socket.create_server((address, 0), family=family, backlog=backlog), address
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=backlog), None


def _allow_files(count: int) -> None:
    """Raise the limit of open files, which is 1024 by default on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
