"""The key-value store, served by rank 0 or by torchrun, through which the processes of a run find each other."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightswitch.errors import Refused

log = logging.getLogger(__name__)

_BACKLOG = 4096  # all processes may connect at once
_POLL_SECONDS = 0.01
_NOTICE_SECONDS = 30.0
_JUDGING_SECONDS = 60.0  # rank 0 may have started last, and waits for the others as long as they do


@dataclass(frozen=True)
class MeetingPoint:
    """The address where the processes of a run meet, and which of them this one is.

    Args:
        address: of rank 0, or of torchrun's store.
        timeout_seconds: how long each process waits for the others.
    """

    address: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float


def open_store(point: MeetingPoint, purpose: str) -> Store:
    """Open the store: serve it in rank 0, connect to it in every other rank.

    A process group can be made at the same address while the store is in use.

    Args:
        purpose: the prefix of all keys.

    Raises:
        Refused: the port is in use, or the store can't be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        served = _served_anew(point) if point.rank == 0 else _joined_anew(point)
    else:
        served = _served(point) if point.rank == 0 else _joined(point)
    return PrefixStore(purpose, served)


def _served_anew(point: MeetingPoint) -> Store:
    """Serve a store of this start's own: torchrun keeps one over restarts, with what an earlier start has written."""
    board, served = _joined(point), _served(replace(point, port=0))
    token = secrets.token_hex(8)
    served.set("token", token)
    board.set("served", f"{served.port} {token}")
    _lead_to(served.port)
    return served


def _joined_anew(point: MeetingPoint) -> Store:
    """Connect to the store that rank 0 serves for this start; torchrun's store says at which port."""
    board = _joined(point)
    end = time.monotonic() + point.timeout_seconds
    while True:
        try:
            port, token = board.get("served").decode().split()
            # a port that an earlier start has written there refuses connections
            socket.create_connection((point.address, int(port)), _POLL_SECONDS * 100).close()
            served = _answered(replace(point, port=int(port)))
            if served.get("token").decode() == token:
                _lead_to(int(port))
                return served
        except (OSError, DistError) as error:
            if time.monotonic() > end:
                raise Refused(_unreached(point, str(error))) from error
        time.sleep(_POLL_SECONDS)


def _lead_to(port: int) -> None:
    """Have the process group made at this port, too."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def _joined(point: MeetingPoint) -> Store:
    _reach(point)
    return _answered(point)


def _served(point: MeetingPoint) -> TCPStore:
    try:
        with contextlib.closing(_listener(point)) as listener:
            return _tcp_store(replace(point, port=listener.getsockname()[1]), listener.detach())
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Refused(
            f"port {point.port} of {socket.gethostname()} is in use; give every process another: "
            f"cluster.main_port={point.port + 1} with cluster=manual, else MASTER_PORT={point.port + 1}"
        ) from error


def _listener(point: MeetingPoint) -> socket.socket:
    """Listen at the address that the processes were given, or at every address of this node if it is a name."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address("127.0.0.1" if point.address == "localhost" else point.address)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            return socket.create_server((str(address), point.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # not an address of this node: translated by the network
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", point.port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)


def _tcp_store(point: MeetingPoint, listener: int | None = None) -> TCPStore:
    return TCPStore(
        point.address,
        point.port,
        point.world_size,
        listener is not None,
        timedelta(seconds=point.timeout_seconds + _JUDGING_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,  # the process group will be served at the same port
        master_listen_fd=listener,
    )


def _reach(point: MeetingPoint) -> None:
    """Wait until the address accepts a connection: torch would try for its own timeout, and not say why it failed."""
    end = time.monotonic() + point.timeout_seconds
    while True:
        try:
            socket.create_connection((point.address, point.port), max(0.1, end - time.monotonic())).close()
            return
        except socket.gaierror as error:
            raise Refused(
                f"{_who(point)} can't resolve the host name {point.address}: {error.strerror}; {_FIX}"
            ) from error
        except OSError as error:
            if time.monotonic() > end:
                raise Refused(_unreached(point, error.strerror or str(error))) from error
        time.sleep(_POLL_SECONDS)


_FIX = "check the address and port that this process was given, and that rank 0 runs"


def _who(point: MeetingPoint) -> str:
    return f"rank {point.rank} on {socket.gethostname()}"


def _unreached(point: MeetingPoint, reason: str) -> str:
    return (
        f"{_who(point)} could not reach rank 0 at {point.address}:{point.port} in {point.timeout_seconds:g} s: "
        f"{reason}; {_FIX}, or wait longer: meet_timeout_seconds={2 * point.timeout_seconds:g}"
    )


def _answered(point: MeetingPoint) -> Store:
    """Connect to the store: a server of another kind may never answer, and torch would wait for it without end."""
    found: list[Store] = []

    def connect() -> None:
        with contextlib.suppress(DistError):
            found.append(_tcp_store(point))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(point.timeout_seconds)
    if not found:
        raise Refused(_unreached(point, "the server there is not the store of a run"))
    return found[0]


def missing(store: Store, point: MeetingPoint) -> list[int]:
    """Return the ranks that have not set the key of their number before the timeout."""
    waiting = list(range(point.world_size))
    start = told = time.monotonic()
    while waiting and time.monotonic() < start + point.timeout_seconds:
        if store.check([str(waiting[0])]):
            waiting.pop(0)
            continue
        if time.monotonic() > told + _NOTICE_SECONDS:
            told = time.monotonic()
            log.info("waiting    for rank %d of %d, for %.0f s", waiting[0], point.world_size, told - start)
        time.sleep(_POLL_SECONDS)
    return [rank for rank in waiting if not store.check([str(rank)])]
