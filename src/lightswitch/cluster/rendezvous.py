"""The store through which the processes of a run meet, and their handshake before they form a process group."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightswitch.cluster import consistency
from lightswitch.cluster.consistency import Evidence
from lightswitch.cluster.sealed import Sealed, Values
from lightswitch.errors import Refused

log = logging.getLogger(__name__)

_BACKLOG = 4096  # all processes may connect at once
_POLL_SECONDS = 0.01
_NOTICE_SECONDS = 30.0
_JUDGING_SECONDS = 60.0  # added to the store's timeout: rank 0 may start last, and waits as long
_LAG_SECONDS = 10.0  # until a shared file system shows a file that another node wrote
_NAMED_SECONDS = 15.0  # for ranks that were started later to learn the id of a run that rank 0 is about to end
_PARTING_SECONDS = 30.0  # for live ranks to read the verdict, before this process ends, and the store with it


@dataclass(frozen=True)
class MeetingPoint:
    """The address where the processes of a run meet, and the rank of this process.

    Args:
        address: of rank 0, or of torchrun's store.
        timeout_seconds: how long each process waits for the others.
    """

    address: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float


@dataclass(frozen=True)
class Meeting:
    """The store by which the processes of a run have agreed on its id, and in which they go on to meet."""

    store: PrefixStore
    point: MeetingPoint

    def part(self) -> None:
        """Wait for a moment, in rank 0, until the others have the id: they report for themselves what ends the run."""
        if self.point.rank == 0:
            _wait_until(lambda: self.store.add("named", 0) + 1 >= self.point.world_size, _NAMED_SECONDS)


def agree_on_id(point: MeetingPoint, own: str) -> tuple[str, Meeting | None]:
    """Return the id of the run, which is that of rank 0, and the meeting to go on with.

    Args:
        own: the id that this process gives the run if it is rank 0.

    Raises:
        Refused: the port is in use, the store can't be reached, or is that of another run.
    """
    if _has_agent_store():  # the agents' store is there before every rank, and outlives them: a restart has the same id
        return PrefixStore("run", _joined(point)).compare_set("id", "", own).decode(), None
    store = open_store(point, "run")
    if point.rank == 0:
        store.set("id", own)
    found = store.get("id").decode()
    if point.rank:
        store.add("named", 1)
    return found, Meeting(store, point)


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(point: MeetingPoint, purpose: str, met: Meeting | None = None) -> PrefixStore:
    """Open the store: serve it in rank 0, connect to it in every other rank.

    A process group can be formed at the same address while the store is in use.

    Args:
        purpose: the prefix of all keys.
        met: an earlier meeting of these processes, whose store is used again.

    Raises:
        Refused: the port is in use, the store can't be reached, or is that of another run.
    """
    if _has_agent_store():
        return PrefixStore(purpose, _served_anew(point) if point.rank == 0 else _joined_anew(point))
    served = met.store.underlying_store if met else _served(point) if point.rank == 0 else _joined(point)
    store = PrefixStore(purpose, served)
    if point.rank == 0:
        store.set("world", str(point.world_size))
    else:
        _take_place(store, point)
    return store


def _take_place(store: Store, point: MeetingPoint) -> None:
    """Take this rank's place in the run of a store.

    Raises:
        Refused: the store is not that of a run, or of another one, which has this rank already or is of another size.
    """
    _wait_until(lambda: store.check(["world"]), point.timeout_seconds)
    if not store.check(["world"]):
        raise Refused(_unreached(point, "the server there is not the store of a run"))
    where, other = f"{point.address}:{point.port}", "if that is another run, set another port for every process of this"
    if (world := int(store.get("world"))) != point.world_size:
        raise Refused(
            f"{_who(point)} is one of {point.world_size}, but rank 0 at {where} is one of {world}; start all with the "
            f"same number, or, {other}"
        )
    if store.add(f"place {point.rank}", 1) > 1:
        raise Refused(
            f"{_who(point)}: a rank {point.rank} has joined the run at {where} already; start each once, or, {other}"
        )


def _served_anew(point: MeetingPoint) -> Store:
    """Serve a new store for this start: torchrun's store survives restarts, with the keys of earlier starts."""
    board, served = _joined(point), _served(replace(point, port=0))
    token = secrets.token_hex(8)
    served.set("token", token)
    board.set("served", f"{served.port} {token}")
    _lead_to(served.port)
    return served


def _joined_anew(point: MeetingPoint) -> Store:
    """Connect to the store that rank 0 serves for this start, at a port that it writes to torchrun's store."""
    board = _joined(point)
    end = time.monotonic() + point.timeout_seconds
    while True:
        try:
            port, token = board.get("served").decode().split()
            # a port from an earlier start refuses connections
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
    """Make torch form the process group at this port, too."""
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
            f"port {point.port} of {socket.gethostname()} is in use; set another for every process: "
            f"cluster.main_port={point.port + 1} with cluster=manual, else MASTER_PORT={point.port + 1}"
        ) from error


def _listener(point: MeetingPoint) -> socket.socket:
    """Listen at the configured address, or at all of this node's if it is a name or not one of them."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address("127.0.0.1" if point.address == "localhost" else point.address)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            return socket.create_server((str(address), point.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # not this node's, as the network translates it
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
    """Wait until the address accepts a connection: torch would retry until its own timeout, and not report why."""
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


_FIX = "check the address and port of this process, and that rank 0 is running"


def _who(point: MeetingPoint) -> str:
    return f"rank {point.rank} on {socket.gethostname()}"


def _unreached(point: MeetingPoint, reason: str) -> str:
    return (
        f"{_who(point)} could not reach rank 0 at {point.address}:{point.port} in {point.timeout_seconds:g} s: "
        f"{reason}; {_FIX}, or wait longer: meet_timeout_seconds={2 * point.timeout_seconds:g}"
    )


def _answered(point: MeetingPoint) -> Store:
    """Connect to the store in a thread, as another kind of server may never answer, and torch would wait forever."""
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
    """Return the ranks that have not set their key, which is their number, before the timeout."""
    waiting = list(range(point.world_size))
    start = reported_at = time.monotonic()
    while waiting and time.monotonic() < start + point.timeout_seconds:
        if store.check([str(waiting[0])]):
            waiting.pop(0)
            continue
        if time.monotonic() > reported_at + _NOTICE_SECONDS:
            reported_at = time.monotonic()
            log.info("waiting    for rank %d of %d, %.0f s so far", waiting[0], point.world_size, reported_at - start)
        time.sleep(_POLL_SECONDS)
    return [rank for rank in waiting if not store.check([str(rank)])]


def agree(
    store: Store, point: MeetingPoint, evidence: Evidence, values: Values, run_dir: Path, tell: bool, refusal: str = ""
) -> str:
    """Compare the processes, and return in each the same line about how they differ, or an empty string if they agree.

    The store holds versions, code digests and one keyed digest of all values; rank 0 deletes them if they agree.

    Args:
        values: the resolved config, which is never written to the store.
        tell: whether rank 0 prints the line before the others read it: the first process to exit may end all others.
        refusal: the reason why rank 0 may not continue, which all ranks return; ignored in other ranks.
    """
    own = replace(evidence, rank=point.rank, node=socket.gethostname(), run_dir=str(run_dir.absolute()))
    verdict = (
        _judge(store, point, own, values, run_dir, tell, refusal)
        if point.rank == 0
        else _submit(store, own, values, run_dir)
    )
    if store.add("heard", 1) == point.world_size and not verdict:  # the last rank deletes the keys
        store.delete_key("verdict")
        store.delete_key("heard")
    return verdict


def _judge(
    store: Store, point: MeetingPoint, own: Evidence, values: Values, run_dir: Path, tell: bool, refusal: str
) -> str:
    sealed = Sealed.make(run_dir, values)
    try:
        own = replace(own, config=sealed.digest)
        store.set("config", own.config)
        store.set("folder", sealed.folder.name)
        store.set("0", _as_json(own))
        absent = missing(store, point)
        verdict = refusal or (_not_joined(absent, point) if absent else _difference(store, point, sealed))
    finally:
        sealed.remove()
    if verdict and tell:
        print(f"error: {verdict}", file=sys.stderr, flush=True)
    if not verdict:
        for key in ("config", "folder", *map(str, range(point.world_size))):
            store.delete_key(key)
    store.set("verdict", verdict)
    if verdict:  # this process may serve the store
        _wait_until(lambda: store.add("heard", 0) + len(absent) + 1 >= point.world_size, _PARTING_SECONDS)
    return verdict


def _difference(store: Store, point: MeetingPoint, sealed: Sealed) -> str:
    sent = store.multi_get([str(rank) for rank in range(point.world_size)])
    return consistency.difference([Evidence(**json.loads(one)) for one in sent], sealed.read) or ""


def _submit(store: Store, own: Evidence, values: Values, run_dir: Path) -> str:
    # a file system that lags caches that a file is missing, so look for it only after it is written
    sealed = Sealed.find(run_dir, store.get("folder").decode(), values, _LAG_SECONDS)
    if sealed is not None:
        own = replace(own, config=sealed.digest)
        if own.config != store.get("config").decode():
            sealed.leave()
    store.set(str(own.rank), _as_json(replace(own, sees_run_directory=sealed is not None)))
    return store.get("verdict").decode()


def _as_json(evidence: Evidence) -> str:
    return json.dumps(asdict(evidence))


def _not_joined(missing: list[int], point: MeetingPoint) -> str:
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks, from rank {missing[0]} on,"
    return (
        f"{ranks} of {point.world_size} did not connect to {point.address}:{point.port} "
        f"in {point.timeout_seconds:g} s; check that all were started, and read their output, or wait longer: "
        f"meet_timeout_seconds={2 * point.timeout_seconds:g}"
    )


def _wait_until(condition: Callable[[], bool], timeout_seconds: float) -> None:
    end = time.monotonic() + timeout_seconds
    while not condition() and time.monotonic() <= end:
        time.sleep(_POLL_SECONDS)
