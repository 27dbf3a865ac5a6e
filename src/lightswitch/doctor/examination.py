"""The examination of a machine, or of all nodes of a job, each process of which takes part in it."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from lightswitch.cluster import consistency, environments, handshake, rendezvous
from lightswitch.cluster.consistency import Evidence
from lightswitch.cluster.rendezvous import MeetingPoint
from lightswitch.cluster.sealed import Values
from lightswitch.doctor import accelerators, machine, network
from lightswitch.doctor.report import Report

RUNS = Path("runs")
CODE = ("train.py", "conf", "src")


def examine(report: Report, timeout_seconds: float) -> None:
    """Look at this machine and, in a job of several processes, at all of them and at the ways between them.

    Collective.

    Args:
        report: gets lines and problems.
        timeout_seconds: of each step.

    Raises:
        Refused: what the environment says of the processes is wrong, or they can't meet.
    """
    environment = environments.detect()
    rank, local_rank, world_size = environment.global_rank(), environment.local_rank(), environment.world_size()
    found = machine.look(local_rank, RUNS)
    versions = consistency.software(on_gpu=torch.cuda.is_available())
    if world_size == 1:
        report.machines([asdict(found)])
        report.software(versions, asdict(found))
        return
    report.is_first = rank == 0
    point = MeetingPoint(environment.main_address, environment.main_port, rank, world_size, timeout_seconds)
    report.line("processes", f"{world_size}, which meet at {point.address}:{point.port}")
    store = rendezvous.open_store(point, "doctor")
    everyone = _gathered(store, point, {**asdict(found), "rank": rank}, report)
    report.machines(everyone)
    report.software(versions, everyone[0])
    others = _unreached(store, point, everyone, found.node, report)
    if others or len(everyone) < world_size:
        return
    code = consistency.digests([path.resolve() for path in map(Path, CODE) if path.exists()])
    shared = RUNS if RUNS.exists() else Path()
    agreed = PrefixStore("agreement", store)
    verdict = handshake.agree(agreed, point, Evidence(versions, code), Values({}), shared, tell=False)
    report.problems += [verdict] if verdict and rank == 0 else []
    _measure(_backends(everyone, report), store, point, local_rank, report)


def _backends(everyone: list[dict[str, Any]], report: Report) -> list[str]:
    """Return the back-ends that all processes can use, the same in each of them."""
    if without := accelerators.without_nccl(everyone):
        if len(without) < len(everyone) and report.is_first:
            fix = "start as many processes on a node as it has GPUs, each of which sees all of them"
            report.problems.append(f"NCCL was not tried, as {without[0]}; {fix}")
        return ["gloo"]
    return ["gloo", "nccl"]


def _gathered(store: Store, point: MeetingPoint, own: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return what each process that came in time has found on its machine, with the address it listens at."""
    listener = network.Listener(point.address)
    store.set(str(point.rank), json.dumps({**own, "address": listener.address}))
    if point.rank == 0:
        missing = rendezvous.missing(store, point)
        report.problems += [f"rank {rank} did not join within {point.timeout_seconds:g} s" for rank in missing]
        store.set("came", json.dumps([rank for rank in range(point.world_size) if rank not in missing]))
    return [json.loads(one) for one in store.multi_get([str(rank) for rank in json.loads(store.get("came"))])]


def _unreached(
    store: Store, point: MeetingPoint, everyone: list[dict[str, Any]], node: str, report: Report
) -> list[str]:
    """Return the pairs of nodes without a way from the first to the second; one process of each node tries it."""
    firsts = {one["node"]: one for one in reversed(everyone)}
    is_first = firsts[node]["rank"] == point.rank
    ways = {name: tuple(one["address"]) for name, one in firsts.items() if name != node} if is_first else {}
    faults = [f"{node} → {name}: {fault}" for name, fault in network.reach(ways).items() if fault]
    store.set(f"faults/{point.rank}", json.dumps(faults))
    told = store.multi_get([f"faults/{one['rank']}" for one in everyone])
    pairs = [pair for one in told for pair in json.loads(one)]
    if len(firsts) > 1 and not pairs:
        report.line("network", f"{len(firsts)} nodes, each of which reaches every other")
    report.problems += [f"{pair}; look at routes and firewalls between the two" for pair in pairs]
    return pairs


def _measure(backends: list[str], store: Store, point: MeetingPoint, local_rank: int, report: Report) -> None:
    for backend in backends:
        limit = threading.Timer(point.timeout_seconds, _give_up, (report, backend, point.timeout_seconds))
        limit.daemon = True
        limit.start()
        try:
            for measured in network.measure(backend, PrefixStore(backend, store), point, local_rank):
                report.bandwidth(backend, measured)
        except RuntimeError as error:
            report.problems.append(f"an all-reduce over {backend} failed: {str(error).splitlines()[0]}")
            return
        finally:
            limit.cancel()


def _give_up(report: Report, backend: str, timeout_seconds: float) -> NoReturn:
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    report.problems.append(
        f"an all-reduce over {backend} did not end in {timeout_seconds:g} s; "
        f"name the network interface that all nodes share: {variable}=eth0"
    )
    code = report.end()
    sys.stdout.flush()
    os._exit(code)  # the main thread may be stuck
