"""What the processes of a run tell each other before they form a group, and what rank 0 makes of it."""

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
from lightswitch.cluster.rendezvous import Place
from lightswitch.cluster.sealed import Sealed, Values

_LAG_SECONDS = 10.0  # until a file that another node wrote is seen on a shared file system
_PARTING_SECONDS = 5.0
_POLL_SECONDS = 0.01


def agree(
    store: Store, place: Place, evidence: Evidence, values: Values, run_dir: Path, tell: bool, refusal: str = ""
) -> str:
    """What is wrong with the processes, in a line that each of them gets; nothing, if they agree.

    The store has versions, digests of code, and one keyed digest of all values, until everyone has been heard.

    Args:
        refusal: why this process, if it is rank 0, may not go on; each of the others gets it, too.
        tell: rank 0 prints the line, before the others know it: the first one to exit may take all with it.
    """
    own = replace(evidence, rank=place.rank, node=socket.gethostname(), run_dir=str(run_dir.absolute()))
    verdict = (
        _judge(store, place, own, values, run_dir, tell, refusal)
        if place.rank == 0
        else _attend(store, own, values, run_dir)
    )
    if store.add("heard", 1) == place.world_size and not verdict:  # the last one clears up
        store.delete_key("verdict")
        store.delete_key("heard")
    return verdict


def _judge(store: Store, place: Place, own: Evidence, values: Values, run_dir: Path, tell: bool, refusal: str) -> str:
    sealed = Sealed.make(run_dir, values)
    try:
        own = replace(own, config=sealed.digest)
        store.set("config", own.config)
        store.set("folder", sealed.folder.name)
        store.set("0", _sent(own))
        missing = rendezvous.missing(store, place)
        verdict = refusal or (_waited(missing, place) if missing else _difference(store, place, sealed))
    finally:
        sealed.remove()
    if verdict and tell:
        print(f"error: {verdict}", file=sys.stderr, flush=True)
    if not verdict:
        for key in ("config", "folder", *map(str, range(place.world_size))):
            store.delete_key(key)
    store.set("verdict", verdict)
    if verdict:  # this process may be the one that serves the store
        _wait_until(lambda: store.add("heard", 0) + len(missing) + 1 >= place.world_size, _PARTING_SECONDS)
    return verdict


def _difference(store: Store, place: Place, sealed: Sealed) -> str:
    sent = store.multi_get([str(rank) for rank in range(place.world_size)])
    return consistency.difference([Evidence(**json.loads(one)) for one in sent], sealed.read) or ""


def _attend(store: Store, own: Evidence, values: Values, run_dir: Path) -> str:
    # a file system that lags keeps what it has once seen, so nobody looks before the file is written
    sealed = Sealed.find(run_dir, store.get("folder").decode(), values, _LAG_SECONDS)
    if sealed is not None:
        own = replace(own, config=sealed.digest)
        if own.config != store.get("config").decode():
            sealed.leave()
    store.set(str(own.rank), _sent(replace(own, sees_run_directory=sealed is not None)))
    return store.get("verdict").decode()


def _sent(evidence: Evidence) -> str:
    return json.dumps(asdict(evidence))


def _waited(missing: list[int], place: Place) -> str:
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks, from rank {missing[0]} on,"
    return (
        f"{ranks} of {place.world_size} did not come to {place.address}:{place.port} in {place.timeout_seconds:g} s; "
        f"look whether all were started, and what they say, or wait longer: "
        f"meet_timeout_seconds={2 * place.timeout_seconds:g}"
    )


def _wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True
