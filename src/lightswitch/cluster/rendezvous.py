"""The store through which the processes of a run meet before they form a process group, and what they compare there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import secrets
import socket
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightswitch import patches
from lightswitch.errors import Refused, listed

log = logging.getLogger(__name__)

_BACKLOG = 4096  # all processes may connect at once
_LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
_POLL_SECONDS = 0.01
_NOTICE_SECONDS = 30.0
_JUDGING_SECONDS = 60.0  # added to the store's timeout: rank 0 may start last, and waits as long
_LAG_SECONDS = 10.0  # until a shared file system shows a file that another node wrote
_NAMED_SECONDS = 15.0  # for ranks that were started later to learn the id of a run that rank 0 is about to end
_PARTING_SECONDS = 30.0  # for live ranks to read the verdict, before this process ends, and the store with it
_FIX = "check the address and port of this process, and that rank 0 is running"


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

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


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
    store.add("named", int(point.rank > 0))
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
    return PrefixStore(purpose, served)


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
            served = _tcp_store(replace(point, port=int(port)))
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


def _served(point: MeetingPoint) -> TCPStore:
    loopback, is_dual = _LOOPBACK.get(point.address), socket.has_dualstack_ipv6()
    is_dual = is_dual and loopback is None
    family = socket.AF_INET6 if is_dual or loopback == "::1" else socket.AF_INET
    try:
        listener = socket.create_server(
            (loopback or "", point.port), family=family, dualstack_ipv6=is_dual, backlog=_BACKLOG
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Refused(
            f"port {point.port} of {socket.gethostname()} is in use; set another for every process: "
            f"cluster.main_port={point.port + 1} with cluster=manual, else MASTER_PORT={point.port + 1}"
        ) from error
    with contextlib.closing(listener):
        return _tcp_store(replace(point, port=listener.getsockname()[1]), listener.detach())


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


def _joined(point: MeetingPoint) -> Store:
    """Connect once the address accepts: torch would retry until its own timeout, and not report why."""
    end = time.monotonic() + point.timeout_seconds
    while True:
        try:
            socket.create_connection((point.address, point.port), max(0.1, end - time.monotonic())).close()
            return _tcp_store(point)
        except socket.gaierror as error:
            raise Refused(
                f"{_who(point)} can't resolve the host name {point.address}: {error.strerror}; {_FIX}"
            ) from error
        except OSError as error:
            if time.monotonic() > end:
                raise Refused(_unreached(point, error.strerror or str(error))) from error
        time.sleep(_POLL_SECONDS)


def _who(point: MeetingPoint) -> str:
    return f"rank {point.rank} on {socket.gethostname()}"


def _unreached(point: MeetingPoint, reason: str) -> str:
    return (
        f"{_who(point)} could not reach rank 0 at {point} in {point.timeout_seconds:g} s: "
        f"{reason}; {_FIX}, or wait longer: meet_timeout_seconds={2 * point.timeout_seconds:g}"
    )


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


def _wait_until(condition: Callable[[], bool], timeout_seconds: float) -> None:
    end = time.monotonic() + timeout_seconds
    while not condition() and time.monotonic() <= end:
        time.sleep(_POLL_SECONDS)


# What a process has, by kind, as text by name. The store is open to whoever reaches its port: put no secrets in it.
Evidence = Mapping[str, Mapping[str, str]]

_FIXES = {  # by kind: the wording of a value, and what the user can do about a difference
    "versions": ("{name} {value}", "install the same version on every node"),
    "code": ("another {name}", "use the same code on every node"),
    "config": ("{name}={value}", "give every process the same overrides"),
}


def compare(store: Store, point: MeetingPoint, own: Evidence, run_dir: Path, refusal: str) -> str:
    """Wait for all processes, and return the reason why they can't start, the same in each; an empty string if none.

    Each compares what it has with what rank 0 has, and tells rank 0 the differences.

    Args:
        run_dir: in which every process has to see what rank 0 writes.
        refusal: the reason why rank 0 may not continue; ignored in other ranks.
    """
    who = {"rank": point.rank, "node": socket.gethostname(), "run_dir": str(run_dir.absolute())}
    if point.rank == 0:
        return _judge(store, point, {**own, **who}, run_dir, refusal)
    of_first = json.loads(store.get("0"))
    differing = {kind: _differing(values, of_first[kind]) for kind, values in own.items()}
    mark = run_dir / os.path.basename(of_first["mark"])
    _wait_until(
        mark.exists, _LAG_SECONDS
    )  # not before it is written: a file system that lags caches that it is missing
    store.set(str(point.rank), json.dumps({**who, **differing, "sees_mark": mark.exists()}))
    verdict = store.get("verdict").decode()
    store.add("heard", 1)
    return verdict


def _differing(values: Mapping[str, str], of_first: Mapping[str, str]) -> dict[str, str | None]:
    """Return the values that differ from those of rank 0; None for one that only rank 0 has."""
    return {name: values.get(name) for name in {**of_first, **values} if values.get(name) != of_first.get(name)}


def _judge(store: Store, point: MeetingPoint, own: Mapping[str, Any], run_dir: Path, refusal: str) -> str:
    mark = run_dir / f".meeting_{secrets.token_hex(8)}"
    mark.touch()
    store.set("0", json.dumps({**own, "mark": mark.name}))
    absent = missing(store, point)
    mark.unlink(missing_ok=True)
    verdict = refusal or (_not_joined(absent, point) if absent else "")
    if not verdict:
        others = store.multi_get([str(rank) for rank in range(1, point.world_size)])
        verdict = difference(own, [json.loads(one) for one in others])
    store.set("verdict", verdict)
    if verdict:  # this process may serve the store
        _wait_until(lambda: store.add("heard", 0) + len(absent) + 1 >= point.world_size, _PARTING_SECONDS)
    return verdict


def _not_joined(absent: list[int], point: MeetingPoint) -> str:
    ranks = f"rank {absent[0]}" if len(absent) == 1 else f"{len(absent)} ranks, from rank {absent[0]} on,"
    return (
        f"{ranks} of {point.world_size} did not connect to {point} "
        f"in {point.timeout_seconds:g} s; check that all were started, and read their output, or wait longer: "
        f"meet_timeout_seconds={2 * point.timeout_seconds:g}"
    )


def difference(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Return one line with the first difference to rank 0 and the ranks that have it; an empty string if there is none.

    Args:
        first: what rank 0 has.
        others: of every other rank, the values that differ from those of rank 0.
    """
    of_first = f"rank 0 on {first['node']}"
    for kind, (form, fix) in _FIXES.items():
        differing = [one for one in others if one.get(kind)]
        if not differing:
            continue
        values = differing[0][kind]
        who = _named([one for one in differing if one[kind] == values])
        theirs = _listed(form, values)
        if kind == "code":
            return f"{who} {theirs} than {of_first}; {fix}"
        of_rank_0 = _listed(form, {name: first[kind].get(name) for name in values})
        return f"{who} {theirs}, {of_first} has {of_rank_0}; {fix}"
    blind = [one for one in others if not one["sees_mark"]]
    if not blind:
        return ""
    where, of_rank_0 = blind[0]["run_dir"], first["run_dir"]
    return (
        f"{_named(blind)} {where} without what {of_first} writes to {of_rank_0}; put runs/ where all nodes can read "
        "it, and start every process in the same folder, with the same run_id"
    )


def _named(processes: Sequence[Mapping[str, Any]]) -> str:
    """Name processes, as in `rank 3 on node2 has` or `8 ranks on node2, node4 have`."""
    if len(processes) == 1:
        return f"rank {processes[0]['rank']} on {processes[0]['node']} has"
    nodes = list(dict.fromkeys(one["node"] for one in processes))
    return f"{len(processes)} ranks on {listed(nodes, 'nodes')} have"


def _listed(form: str, values: Mapping[str, str | None]) -> str:
    texts = [f"no {name}" if text is None else form.format(name=name, value=text) for name, text in values.items()]
    return listed(texts, "others")


def software(on_gpu: bool) -> dict[str, str]:
    """Return the versions that all processes must share: Python, torch, Lightning, DeepSpeed and, on GPUs, NCCL."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= patches.versions(("lightning", "deepspeed"))
    if on_gpu:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # untyped in torch
    return found


def digests(roots: Iterable[Path]) -> dict[str, str]:
    """Return digests of the Python and YAML files in some folders, by path relative to the folder's parent."""
    found = {}
    for root in roots:
        for path in [root] if root.is_file() else sorted((*root.rglob("*.py"), *root.rglob("*.yaml"))):
            with contextlib.suppress(OSError):  # a link to nothing, such as an editor's lock, or removed by now
                digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
                found[os.path.relpath(path, root.parent)] = digest
    return found


def source_folders(target: str) -> list[Path]:
    """Return the folders, or the file, of a dotted name's package; nothing if it was installed, or is missing."""
    spec = find_spec(target.partition(".")[0])
    if spec is None:
        return []
    installed = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    paths = list(spec.submodule_search_locations or [str(spec.origin)])
    return [Path(path) for path in paths if not path.startswith(installed)]
