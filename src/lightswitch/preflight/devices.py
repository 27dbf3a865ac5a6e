"""What started this process and what this machine has: variables of launchers, nodes, processes, GPUs, packages."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightswitch.cluster import placement
from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.errors import RefusedRequest


@dataclass(frozen=True)
class Launcher:
    """A launcher's variables and options.

    Attributes:
        starter: how to use it.
        needed: the variables that each process has.
        ordered: the numbers of processes, of the node and of the process on it.
        options: what sets the number of nodes, and of processes on each.
    """

    starter: str
    needed: tuple[str, ...]
    ordered: tuple[str, str, str]
    options: tuple[str, str]


_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("STEP_NUM_TASKS", "STEP_NUM_NODES", "PROCID", "LOCALID", "NODEID", "NTASKS")
_OF_SLURM = tuple(f"SLURM_{name}" for name in _SLURM)
LAUNCHERS = {
    "torchrun": Launcher(
        "start it with torchrun --nproc-per-node=N train.py",
        ("LOCAL_RANK", *_MEETING),
        ("WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK"),
        ("--nnodes={}", "--nproc-per-node={}"),
    ),
    "env": Launcher(
        f"export {', '.join(_MEETING)} for each process",
        _MEETING,
        ("WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"),
        ("GROUP_WORLD_SIZE={}", "LOCAL_WORLD_SIZE={}"),
    ),
    "slurm": Launcher(
        "start it with srun --ntasks-per-node=N python train.py",
        _OF_SLURM,
        ("SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_LOCALID"),
        ("--nodes={}", "--ntasks-per-node={}"),
    ),
}
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")  # without a launcher, they are another run's
_NUMBERS = (*_OF_A_RANK, "NODE_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT", *_OF_SLURM)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Check that the variables of launchers describe a rank of a run, or that there are none.

    Lightning, torch and DeepSpeed use them unchecked: as numbers, or as a rank among processes that may not exist. The
    process would print nothing, write no checkpoint, or wait for the other ranks.

    Raises:
        RefusedRequest: they do not.
    """
    name = "slurm"
    try:
        name = placement.launcher(environ)
        if _is_a_place(environ):
            return
    except (KeyError, ValueError, ZeroDivisionError):  # one is missing, or is no number
        pass
    there = [one for one in ("TORCHELASTIC_RUN_ID", *_NUMBERS, "MASTER_ADDR") if one in environ]
    own = ("SLURM",) if name == "slurm" else ("TORCH", "RANK", "LOCAL", "NODE", "GROUP", "WORLD")
    found = [one for one in there if one.startswith((*own, "MASTER"))] or there
    launcher = LAUNCHERS.get(name, LAUNCHERS["env"])
    needed, typed = ", ".join(launcher.needed), " ".join(found)
    expected = f"expected one rank's {needed}, with ranks numbered from 0, node by node, and as many on each node"
    raise RefusedRequest([f"{_set(environ, found)}: {expected}; {launcher.starter}, or type unset {typed}"])


def _is_a_place(environ: Mapping[str, str]) -> bool:
    """Return whether launchers' variables describe a rank of a run whose ranks are numbered node by node.

    Lightning, and strategies that shard over the devices of a node, rely on that order.

    Raises:
        KeyError, ValueError, ZeroDivisionError: one is missing, or is not a number.
    """
    numbers = {name: int(environ[name]) for name in _NUMBERS if name in environ}
    is_port = 0 < numbers.get("MASTER_PORT", 1) < 2**16
    if min(numbers.values(), default=0) < 0 or not is_port or not environ.get("MASTER_ADDR", "localhost").strip():
        return False
    place = placement.detect(environ)
    if not place.is_external:
        is_alone = (environ.get("RANK"), environ.get("WORLD_SIZE")) == ("0", "1")  # of a run of one process
        is_numbered = not numbers.keys().isdisjoint(_OF_A_RANK) or numbers.get("SLURM_PROCID", 0) > 0
        return placement.is_child(environ) or is_alone or not is_numbered
    launcher, per_node = LAUNCHERS[place.launcher], place.devices_per_node or 1
    node, local = divmod(place.rank, per_node) if place.launcher == "env" else (0, 0)  # as Lightning, where unset
    node, local = numbers.get(launcher.ordered[1], node), numbers.get(launcher.ordered[2], local)
    on_each = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # of 4(x2),3
    is_even = place.nodes * per_node == numbers[launcher.ordered[0]] and len({*on_each}) < 2
    is_whole = all(name in environ for name in launcher.needed)
    return is_whole and is_even and local < per_node and place.rank == node * per_node + local < place.nodes * per_node


def _set(environ: Mapping[str, str], names: Sequence[str]) -> str:
    shown = {name: environ[name] if re.fullmatch(r"[\w.:-]+", environ[name]) else repr(environ[name]) for name in names}
    return " and ".join(f"{name}={value}" for name, value in shown.items())


# The devices that a config asks for, and those of this machine


_AS_MANY_AS_THERE_ARE = ("auto", -1, "-1")


@dataclass(frozen=True)
class Present:
    """Number of accelerators that this process sees, by kind.

    Attributes:
        cuda: NVIDIA GPUs, or AMD GPUs with a ROCm build of torch.
        mps: Apple GPUs.
    """

    cuda: int = 0
    mps: int = 0


def present() -> Present:
    """Count the accelerators that this process sees, without initialising them."""
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

    return Present(CUDAAccelerator.auto_device_count(), int(MPSAccelerator.is_available()))


def wrong_counts(trainer: dict[str, Any]) -> Iterator[str]:
    """Yield the problems in the numbers of nodes and devices that do not depend on the machine."""
    nodes, devices = trainer["num_nodes"], trainer["devices"]
    if type(nodes) is not int or nodes < 1:
        yield f"trainer.num_nodes={nodes}: use a number from 1"
    if not re.fullmatch(r"auto|-1|[1-9]\d*|\d+,(\d+,?)*|\[\d+(,\d+)*\]", str(devices).replace(" ", "")):
        yield f"trainer.devices={devices}: use a number from 1, a list of GPUs such as [0,1], -1 or auto"


def indices(devices: int | str | list[int]) -> list[int] | None:
    """Return the GPU indices that `Trainer(devices=)` lists, or None if it is a count."""
    if isinstance(devices, str) and "," in devices:  # "2," is the one GPU with the index 2
        return [int(index) for index in devices.split(",") if index.strip()]
    return [int(index) for index in devices] if isinstance(devices, list) else None


def count(trainer: dict[str, Any], there: Present | None = None) -> int:
    """Return the number of devices per node that a Trainer's arguments select.

    Args:
        trainer: arguments of the Trainer; those about devices have passed `wrong_counts`.
        there: accelerators of this machine; None to look them up if the number depends on them.
    """
    devices = trainer["devices"]
    if devices in _AS_MANY_AS_THERE_ARE:
        there = there or present()
        return max(1, getattr(there, accelerator(trainer, there), 1))  # on CPUs, Lightning's auto is one process
    named = indices(devices)
    return int(devices) if named is None else len(named)


def accelerator(trainer: dict[str, Any], there: Present | None = None) -> str:
    """Return the accelerator in use: cpu, cuda or mps, with `auto` and `gpu` resolved.

    Args:
        there: accelerators of this machine; None to look them up if the answer depends on them.
    """
    name = str(trainer.get("accelerator", "auto"))
    if name not in ("auto", "gpu"):
        return name
    there = there or present()
    return "cuda" if there.cuda else "mps" if there.mps else "cpu" if name == "auto" else "cuda"


def absent(trainer: dict[str, Any], place: Placement, there: Present | None = None) -> Iterator[str]:
    """Yield the problem of a run that requests more accelerators than this machine has.

    Args:
        place: the launcher that started this process, and its numbers of nodes and processes.
        there: accelerators of this machine; None to look them up.
    """
    there, devices = there or present(), trainer["devices"]
    kind, wanted, named = accelerator(trainer, there), count(trainer, there), indices(devices)
    seen = getattr(there, kind, wanted)
    if kind == "cpu" and (devices in (-1, "-1") or named is not None):
        yield f"trainer.devices={devices} names GPUs, and the run is on the CPU; use a number of processes or auto"
    elif not seen:
        yield f"trainer.accelerator={trainer['accelerator']}: this machine has none; use trainer.accelerator=cpu"
    elif place.is_external and wanted > seen:
        found = f"{place.launcher} started {wanted} processes on each node, and this one sees {_counted(seen, 'GPU')}"
        fewer = LAUNCHERS[place.launcher].options[1].format(seen)
        yield f"{found}: each needs its own; use {fewer}, or show it all (CUDA_VISIBLE_DEVICES, srun --gpus-per-node=N)"
    elif wanted > seen:
        on_cpu = "" if named else f", or trainer.accelerator=cpu for {wanted} processes on the CPU"
        yield f"trainer.devices={devices}: this machine has {_counted(seen, 'GPU')}; use trainer.devices={seen}{on_cpu}"


def compiler_problems(compile: Mapping[str, Any] | None, accelerator: str) -> Iterator[str]:
    """Yield the compiler that inductor builds its kernels with, if it is missing."""
    variable, default = ("CXX", "g++") if accelerator in ("cpu", "mps") else ("CC", "gcc")
    compiler = os.environ.get(variable) or default
    if compile and compile.get("backend", "inductor") == "inductor" and shutil.which(compiler) is None:
        yield (
            f"compile=true needs a compiler, and there is no {compiler} here; type apt-get install {default}, or "
            f"export {variable}=PATH of another, or, to compile without one, compile.backend=aot_eager"
        )


# The processes that were started, and those that the config asks for


_MPI_SIZES = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}  # of Open MPI; of MPICH, Intel MPI and Cray
_DETECT = "lightswitch.cluster.environments.detect"


def process_problems(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield the problems of a config that does not match the processes that were started."""
    trainer, started = cfg["trainer"], place.launcher
    nodes, per_node = trainer["num_nodes"], count(trainer)
    if not place.is_external:
        for name, key, ranks in (("NODE_RANK", "num_nodes", nodes), ("LOCAL_RANK", "devices", per_node)):
            if int(os.environ.get(name, 0)) >= ranks:  # Lightning trusts it: no output, no checkpoint
                found = f"{name}={os.environ[name]} and trainer.{key}={ranks}: found a rank that is not in this run"
                yield f"{found}; type unset {name}, or give trainer.{key}"
    elif (place.nodes, place.devices_per_node) != (nodes, per_node):
        found = f"{_counted(place.nodes, 'node')} × {_counted(place.devices_per_node, 'process')}"
        counts = zip(LAUNCHERS[started].options, (place.nodes, place.devices_per_node), (nodes, per_node), strict=True)
        options = " ".join(option.format(asked) for option, there, asked in counts if there != asked)
        yield (
            f"{started} started {found}, but the trainer has num_nodes={nodes}, devices={per_node}; start it with "
            f"{options}, or leave both out to train on what was started"
        )
    wanted = (cfg.get("cluster") or {}).get("launcher", started)
    if wanted in LAUNCHERS and wanted != started:
        mend = f"{LAUNCHERS[wanted].starter} or leave cluster out"
        yield f"cluster={wanted}, but {wanted} did not start this process; {mend}"
    strategy = trainer.get("strategy")
    if isinstance(strategy, dict) and strategy.get("start_method") == "spawn" and started in ("torchrun", "slurm"):
        starter = {"torchrun": "torchrun", "slurm": "srun"}[started]
        yield f"strategy=ddp_spawn starts the ranks itself, and {starter} has started them; use strategy=ddp"
    sizes = {starter: os.environ.get(size, "1") for starter, size in _MPI_SIZES.items()}
    mpi = next((starter for starter, size in sizes.items() if size != "1"), None)
    if mpi and not place.is_external and _cluster(cfg) == _DETECT:  # srun sets these variables, too
        yield (
            f"{_MPI_SIZES[mpi]}={sizes[mpi]}: {mpi} started {sizes[mpi]} processes, and each would be a run of its "
            "own; type python train.py trainer.devices=N, which starts a machine's processes itself, or start them "
            f"with torchrun or srun; if no MPI started this process, type unset {_MPI_SIZES[mpi]}"
        )


def _cluster(cfg: dict[str, Any]) -> str:
    return str((cfg.get("cluster") or {}).get("_target_", _DETECT))


def node_problems(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield a problem if the run's other nodes would not be there, or not survive a change."""
    nodes, elastic = cfg["trainer"]["num_nodes"], elastic_nodes()
    is_met = place.is_external or _cluster(cfg) != _DETECT or os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}
    if nodes > 1 and not is_met:  # it would wait for the others until `meet_timeout_seconds` have passed
        yield (
            f"trainer.num_nodes={nodes}: no launcher has started the processes of {nodes} nodes; start it "
            "with srun or torchrun, and leave trainer.num_nodes out, or start it on each node by the same command with "
            "cluster=manual cluster.node_rank=N cluster.main_address=FIRST_NODE"
        )
    # The agents of torch 2.4 to 2.13 reuse the rendezvous address of the first group of nodes: a node that joins waits
    # for it, and if the node of rank 0 is lost, all others wait for it.
    if elastic is not None and os.environ.get(NO_SHARED_STORE) != "1":
        yield (
            f"torchrun --nnodes={elastic[0]}:{elastic[-1]}: the run would time out after a minute when a node joins, "
            f"or when the node of rank 0 is lost; type export {NO_SHARED_STORE}=1 on every node before torchrun"
        )


def _counted(count: int | None, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
