"""The handshake of a run's processes before they form a group: rank 0 compares their versions, code and config."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from torch._C._distributed_c10d import Store

from lightswitch.cluster import consistency, rendezvous
from lightswitch.cluster.consistency import Evidence
from lightswitch.cluster.rendezvous import MeetingPoint
from lightswitch.cluster.sealed import Sealed, Values

_LAG_SECONDS = 10.0  # until a shared file system shows a file that another node wrote
_PARTING_SECONDS = 5.0
_POLL_SECONDS = 0.01


def agree(
    store: Store, point: MeetingPoint, evidence: Evidence, values: Values, run_dir: Path, tell: bool, refusal: str = ""
) -> str:
    """Compare the processes, and return the same line in each of them: how they differ, or nothing if they agree.

    The store holds versions, digests of code, and one keyed digest of all values, until all ranks have read the answer.

    Args:
        values: the resolved config, which the store never holds.
        tell: let rank 0 print the line before the others know it: the first process to exit may end all others.
        refusal: why this process, if it is rank 0, may not go on; each of the others gets it, too.
    """
    own = replace(evidence, rank=point.rank, node=socket.gethostname(), run_dir=str(run_dir.absolute()))
    verdict = (
        _judge(store, point, own, values, run_dir, tell, refusal)
        if point.rank == 0
        else _submit(store, own, values, run_dir)
    )
    if store.add("heard", 1) == point.world_size and not verdict:  # the last one deletes the keys
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
        missing = rendezvous.missing(store, point)
        verdict = refusal or (_not_joined(missing, point) if missing else _difference(store, point, sealed))
    finally:
        sealed.remove()
    if verdict and tell:
        print(f"error: {verdict}", file=sys.stderr, flush=True)
    if not verdict:
        for key in ("config", "folder", *map(str, range(point.world_size))):
            store.delete_key(key)
    store.set("verdict", verdict)
    if verdict:  # this process may be the one that serves the store
        _wait_until(lambda: store.add("heard", 0) + len(missing) + 1 >= point.world_size, _PARTING_SECONDS)
    return verdict


def _difference(store: Store, point: MeetingPoint, sealed: Sealed) -> str:
    sent = store.multi_get([str(rank) for rank in range(point.world_size)])
    return consistency.difference([Evidence(**json.loads(one)) for one in sent], sealed.read) or ""


def _submit(store: Store, own: Evidence, values: Values, run_dir: Path) -> str:
    # a file system that lags caches that a file is missing, so nobody looks before it is written
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
