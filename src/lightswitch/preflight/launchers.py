"""Processes that torchrun, srun or the user has started, against what the config asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.preflight import devices

_EVENED = {
    "slurm": "use --ntasks-per-node={}",
    "torchrun": "give every torchrun the same --nproc-per-node",
    "env": "export the same LOCAL_WORLD_SIZE on every node",
}
_DETECT = "lightswitch.cluster.environments.detect"


def other_counts(trainer: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield how the processes that were started differ from the trainer's nodes and devices."""
    nodes, per_node = trainer["num_nodes"], devices.count(trainer)
    if not place.is_external:
        yield from _elsewhere({"NODE_RANK": nodes, "LOCAL_RANK": per_node})
    if place.uneven:
        yield (
            f"{place.launcher} started {place.uneven} processes on {place.nodes} nodes, and each must have as many as "
            f"the others; {_EVENED[place.launcher].format(place.devices_per_node)}"
        )
    elif place.is_external and (place.nodes, place.devices_per_node) != (nodes, per_node):
        yield (
            f"{place.launcher} started {_counted(place.nodes, 'node')} × "
            f"{_counted(place.devices_per_node, 'process')}, and the trainer has "
            f"num_nodes={nodes}, devices={per_node}; leave both out, they follow the launcher"
        )


def _elsewhere(counts: dict[str, int]) -> Iterator[str]:
    """Yield variables that give this process a rank beyond the run's.

    Lightning believes them, and trains without a word or a checkpoint.
    """
    arguments = {"NODE_RANK": "trainer.num_nodes", "LOCAL_RANK": "trainer.devices"}
    for name, count in counts.items():
        if int(os.environ.get(name, 0)) >= count:
            told = f"{name}={os.environ[name]} and {arguments[name]}={count}"
            yield f"{told}: found a rank that is not in this run; type unset {name}, or give {arguments[name]}"


def _counted(count: int | None, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def absent(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield that a cluster was named whose launcher did not start this process."""
    name = str((cfg.get("cluster") or {}).get("_target_")).rpartition(".")[2]
    wanted = {"TorchElasticEnvironment": "torchrun", "SLURMEnvironment": "slurm"}.get(name)
    found = place.launcher
    if wanted and wanted != found:
        starter = {"torchrun": "torchrun --nproc-per-node=N train.py", "slurm": "srun python train.py"}[wanted]
        yield f"cluster={wanted}, and {wanted} did not start this process; start it by {starter}, or leave cluster out"


def unstarted(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield that a run has several nodes, and nothing starts processes on the others or says where the first one is.

    It would wait for them until `meet_timeout_seconds` are over.
    """
    nodes = cfg["trainer"]["num_nodes"]
    named = str((cfg.get("cluster") or {}).get("_target_", _DETECT)) != _DETECT
    if nodes > 1 and not (place.is_external or named or "MASTER_ADDR" in os.environ):
        yield (
            f"trainer.num_nodes={nodes}: no launcher has started the processes of {_counted(nodes, 'node')}; start it "
            "by srun or torchrun, and leave trainer.num_nodes out, or on each node by the same command with "
            "run_id=NAME cluster=manual cluster.node_rank=N cluster.main_address=FIRST_NODE"
        )


def unfit_for_changes() -> Iterator[str]:
    """Yield that torchrun would not survive a change of its nodes.

    Unless told otherwise, agents of torch 2.4 to 2.13 keep the address that the first group of nodes met at: one that
    joins waits for it, and all wait for a node that was lost with rank 0, until they time out.
    """
    nodes = elastic_nodes()
    if nodes is not None and os.environ.get(NO_SHARED_STORE) != "1":
        yield (
            f"torchrun --nnodes={nodes[0]}:{nodes[-1]}: a node that joins, and the loss of rank 0's, would end the run "
            f"after a minute's wait; type export {NO_SHARED_STORE}=1 on every node before torchrun"
        )
