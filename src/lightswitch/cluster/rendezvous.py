"""Where the processes of a run meet before they form a group: a key-value store that rank 0 or torchrun serves."""

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

_BACKLOG = 4096  # all processes may come at once
_POLL_SECONDS = 0.01
_NOTICE_SECONDS = 30.0
_JUDGING_SECONDS = 60.0  # rank 0 may have come last, and waits as long as the others did


@dataclass(frozen=True)
class Place:
    """This process among those that it is to meet."""

    address: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float


def come(place: Place, purpose: str) -> Store:
    """The store, for the keys of one purpose. A process group can be made at the same address while it is in use.

    Raises:
        Refused: the port is in use, or the store can't be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        served = _served_anew(place) if place.rank == 0 else _joined_anew(place)
    else:
        served = _served(place) if place.rank == 0 else _joined(place)
    return PrefixStore(purpose, served)


def _served_anew(place: Place) -> Store:
    """torchrun keeps one store over its restarts. In it, this start would read what an earlier one has written."""
    board, served = _joined(place), _served(replace(place, port=0))
    token = secrets.token_hex(8)
    served.set("token", token)
    board.set("served", f"{served.port} {token}")
    _lead_to(served.port)
    return served


def _joined_anew(place: Place) -> Store:
    board = _joined(place)
    end = time.monotonic() + place.timeout_seconds
    while True:
        try:
            port, token = board.get("served").decode().split()
            # nobody serves any more what an earlier start has written there
            socket.create_connection((place.address, int(port)), _POLL_SECONDS * 100).close()
            served = _answered(replace(place, port=int(port)))
            if served.get("token").decode() == token:
                _lead_to(int(port))
                return served
        except (OSError, DistError) as error:
            if time.monotonic() > end:
                raise Refused(_unreached(place, str(error))) from error
        time.sleep(_POLL_SECONDS)


def _lead_to(port: int) -> None:
    """The process group is made at the same place."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def _joined(place: Place) -> Store:
    _reach(place)
    return _answered(place)


def _served(place: Place) -> TCPStore:
    try:
        with contextlib.closing(_listener(place)) as listener:
            return _tcp_store(replace(place, port=listener.getsockname()[1]), listener.detach())
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Refused(
            f"port {place.port} of {socket.gethostname()} is in use; give every process another: "
            f"cluster.main_port={place.port + 1} with cluster=manual, else MASTER_PORT={place.port + 1}"
        ) from error


def _listener(place: Place) -> socket.socket:
    """For all processes of the run to connect to: at every address of this node, unless they were given the one."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address("127.0.0.1" if place.address == "localhost" else place.address)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            return socket.create_server((str(address), place.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # it is not of this node: translated on the way
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", place.port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)


def _tcp_store(place: Place, listener: int | None = None) -> TCPStore:
    return TCPStore(
        place.address,
        place.port,
        place.world_size,
        listener is not None,
        timedelta(seconds=place.timeout_seconds + _JUDGING_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,  # the process group will be served at the same port
        master_listen_fd=listener,
    )


def _reach(place: Place) -> None:
    """Torch would try for its own time-out, and not say why."""
    end = time.monotonic() + place.timeout_seconds
    while True:
        try:
            socket.create_connection((place.address, place.port), max(0.1, end - time.monotonic())).close()
            return
        except socket.gaierror as error:
            raise Refused(f"{_who(place)} knows no host {place.address}: {error.strerror}; {_MEND}") from error
        except OSError as error:
            if time.monotonic() > end:
                raise Refused(_unreached(place, error.strerror or str(error))) from error
        time.sleep(_POLL_SECONDS)


_MEND = "look at the address and port that this process was given, and at rank 0"


def _who(place: Place) -> str:
    return f"rank {place.rank} on {socket.gethostname()}"


def _unreached(place: Place, reason: str) -> str:
    return (
        f"{_who(place)} could not reach rank 0 at {place.address}:{place.port} in {place.timeout_seconds:g} s: "
        f"{reason}; {_MEND}, or wait longer: meet_timeout_seconds={2 * place.timeout_seconds:g}"
    )


def _answered(place: Place) -> Store:
    """A server that is none of torch's may never answer, and torch would wait for it without end."""
    found: list[Store] = []

    def connect() -> None:
        with contextlib.suppress(DistError):
            found.append(_tcp_store(place))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(place.timeout_seconds)
    if not found:
        raise Refused(_unreached(place, "what listens there does not answer as rank 0 would"))
    return found[0]


def missing(store: Store, place: Place) -> list[int]:
    """The ranks that have not set the key of their number when the time is over."""
    waiting = list(range(place.world_size))
    start = told = time.monotonic()
    while waiting and time.monotonic() < start + place.timeout_seconds:
        if store.check([str(waiting[0])]):
            waiting.pop(0)
            continue
        if time.monotonic() > told + _NOTICE_SECONDS:
            told = time.monotonic()
            log.info("waiting    for rank %d of %d, for %.0f s", waiting[0], place.world_size, told - start)
        time.sleep(_POLL_SECONDS)
    return [rank for rank in waiting if not store.check([str(rank)])]
