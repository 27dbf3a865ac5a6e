"""What started this process and what this machine has: variables of launchers, nodes, processes, GPUs, packages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lightswitch.cluster import placement
from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.errors import RefusedRequest, nearest


@dataclass(frozen=True)
class Launcher:
    """A launcher's variables and options.

    Attributes:
        starter: how to use it.
        signs: the variables that reveal it.
        needed: the variables that each process needs.
        world_size: the variable with the number of processes.
        ordered: the global rank, the node's and the local rank.
        options: what sets the number of nodes, and of processes on each.
        fewer: how to start fewer processes on a node, or let each see more GPUs.
    """

    starter: str
    signs: tuple[str, ...]
    needed: tuple[str, ...]
    world_size: str
    ordered: tuple[str, str, str]
    options: tuple[str, str]
    fewer: str


_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS = {
    "torchrun": Launcher(
        "start it with torchrun --nproc-per-node=N train.py",
        ("TORCHELASTIC_RUN_ID",),
        ("RANK", "LOCAL_RANK", *_MEETING[1:]),
        "WORLD_SIZE",
        ("RANK", "GROUP_RANK", "LOCAL_RANK"),
        ("--nnodes={}", "--nproc-per-node={}"),
        "use --nproc-per-node={}, or list {} GPUs in CUDA_VISIBLE_DEVICES",
    ),
    "env": Launcher(
        f"export {', '.join(_MEETING)} for each process",
        ("RANK", "WORLD_SIZE"),
        _MEETING,
        "WORLD_SIZE",
        ("RANK", "NODE_RANK", "LOCAL_RANK"),
        ("GROUP_WORLD_SIZE={}", "LOCAL_WORLD_SIZE={}"),
        "export LOCAL_WORLD_SIZE={} and start that many ranks, or list {} GPUs in CUDA_VISIBLE_DEVICES",
    ),
    "slurm": Launcher(
        "start it with srun --ntasks-per-node=N python train.py",
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),
        ("--nodes={}", "--ntasks-per-node={}"),
        "use --ntasks-per-node={}, or --gpus-per-node={} in place of --gpus-per-task",
    ),
}
_NUMBERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "MASTER_PORT"),
)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Check the environment variables that launchers set.

    Lightning, torch and DeepSpeed use them unchecked: as numbers, or as a rank among processes that may not exist.

    Raises:
        RefusedRequest: with all problems, one line each.
    """
    if problems := list(_malformed(environ)) or list(_misplaced(environ)):
        raise RefusedRequest(problems)


def _malformed(environ: Mapping[str, str]) -> Iterator[str]:
    for name in _NUMBERS:
        value, least = environ.get(name, "1"), int(not name.endswith(("RANK", "ID")))
        most = 65535 if name == "MASTER_PORT" else 10**9
        if not re.fullmatch("[0-9]{1,12}", value) or not least <= int(value) <= most:
            yield (
                f"{name}: found {value!r}, expected a whole number from {least} to {most}; set a valid value, or type "
                f"unset {name}"
            )
    if not environ.get("MASTER_ADDR", "localhost").strip():
        yield "MASTER_ADDR: found '', expected a host's name or address; set a valid value, or type unset MASTER_ADDR"


def _misplaced(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield contradictions between variables that are each well-formed."""
    launcher = LAUNCHERS.get(placement.launcher(environ))
    if launcher is None:
        yield from _ranks_of_nobody(environ)
    elif missing := [name for name in launcher.needed if name not in environ]:
        found = f"{_set(environ, launcher.signs)}: there is no {', '.join(missing)}"
        yield f"{found}; {launcher.starter}, or type unset {' '.join(launcher.signs)}"
    else:
        yield from _out_of_order(launcher, environ)


def _out_of_order(launcher: Launcher, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem unless each node has as many processes as the others, and ranks are numbered node by node.

    Lightning, and strategies that shard over the devices of a node, rely on that order.
    """
    place = placement.detect(environ)
    per_node, processes = place.devices_per_node or 1, int(environ[launcher.world_size])
    defaults = {"NODE_RANK": place.rank // per_node, "LOCAL_RANK": place.rank % per_node}  # of exported ranks
    node, local = (int(environ.get(name, defaults.get(name, 0))) for name in launcher.ordered[1:])
    on_each = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # of 4(x2),3
    is_even = place.nodes * per_node == processes and len({*on_each}) < 2
    if not is_even or local >= per_node or place.rank >= processes or node * per_node + local != place.rank:
        found = _set(environ, [one for one in (launcher.world_size, *launcher.ordered) if one in environ])
        yield (
            f"{found}: expected {_counted(per_node, 'process')} on each of {_counted(place.nodes, 'node')}, numbered "
            f"node by node from 0; {launcher.starter}"
        )


def _ranks_of_nobody(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield variables that give this process a rank, although no launcher has started other processes.

    Lightning trusts them: the process would print nothing, write no checkpoint, or wait for the other ranks.
    """
    is_alone = environ.get("RANK") == "0" and environ.get("WORLD_SIZE") == "1"  # inherited from a run of one process
    if placement.is_child(environ) or is_alone:
        return
    if placed := [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK") if name in environ]:
        missing = [name for name in _MEETING if name not in environ]
        mend = f"type unset {' '.join(placed)}, or {LAUNCHERS['env'].starter}"
        yield f"{_set(environ, placed)}: there is no {', '.join(missing)}; {mend}"
    if int(environ.get("SLURM_PROCID", 0)) > 0:
        yield f"{_set(environ, ('SLURM_PROCID',))}: srun started no other process of this run; type unset SLURM_PROCID"


def _set(environ: Mapping[str, str], names: Sequence[str]) -> str:
    shown = {name: environ[name] if re.fullmatch(r"[\w.:-]+", environ[name]) else repr(environ[name]) for name in names}
    return " and ".join(f"{name}={value}" for name, value in shown.items())


_OF_ACCELERATE = {
    **{"ACCELERATE_MIXED_PRECISION": "precision", "ACCELERATE_USE_FSDP": "strategy"},
    "ACCELERATE_USE_DEEPSPEED": "strategy",
}


def accelerate_problems(typed: Set[str], environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a problem for each choice that `accelerate launch` has exported, and no typed key decides."""
    for name, key in _OF_ACCELERATE.items():
        if environ.get(name, "no").lower() not in ("no", "false") and key not in typed:
            found = f"{_set(environ, (name,))}: accelerate launch has exported it, and nothing reads it"
            yield f"{found}; type {key}=VALUE"


def torchvision_problems(found: Mapping[str, str], requirements: Sequence[str]) -> Iterator[str]:
    """Yield a problem if torchvision is built for another torch: importing it fails, and names no cause.

    Args:
        found: versions of torch and torchvision, if they are installed.
        requirements: of torchvision, from its metadata.
    """
    builds = {version.partition("+")[2] for version in found.values()}
    is_known = all(re.fullmatch(r"|cpu|cu\d+|rocm[\d.]+|xpu", one) for one in builds)  # of PyPI's, it is empty
    torch = found.get("torch", "")
    needed = next((one[1] for text in requirements if (one := re.match(r"torch *\(?== *(\d+\.\d+)", text))), torch)
    if len(found) == 2 and (not torch.startswith(needed) or (is_known and len(builds) == 2)):
        yield (
            f"torch {torch} is installed, and torchvision {found['torchvision']} is built for another; type "
            "pip install --force-reinstall torch torchvision, with the --index-url of that torch"
        )


# The devices that a config asks for, and those of this machine


_AS_MANY_AS_THERE_ARE = ("auto", -1, "-1")
_NAMES = ("auto", "gpu", "cuda", "mps", "cpu")


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
    try:
        named = indices(devices)
        wrong = devices not in _AS_MANY_AS_THERE_ARE and (int(devices) if named is None else len(named)) < 1
        wrong = wrong or any(index < 0 for index in named or ())
    except (TypeError, ValueError):
        wrong, named = True, None
    if wrong:
        yield f"trainer.devices={devices}: use a number from 1, a list of GPUs such as [0,1], -1 or auto"
    elif named and len(set(named)) < len(named):
        yield f"trainer.devices={devices}: a GPU is listed twice, but each process needs its own GPU; list each once"


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
    """Yield the problems of a run that requests accelerators that this machine does not have.

    Args:
        place: the launcher that started this process, and its numbers of nodes and processes.
        there: accelerators of this machine; None to look them up.
    """
    there = there or present()
    name, devices = str(trainer.get("accelerator", "auto")), trainer["devices"]
    kind, wanted, named = accelerator(trainer, there), count(trainer, there), indices(devices)
    if name not in _NAMES:
        yield f"trainer.accelerator={name} is not supported.{nearest(name, _NAMES)} Choices: {', '.join(_NAMES)}"
    if kind == "cpu" and (devices in (-1, "-1") or named is not None):
        yield f"trainer.devices={devices} names GPUs, and the run is on the CPU; use a number of processes or auto"
    if kind not in ("cuda", "mps"):
        return
    seen = getattr(there, kind)
    if not seen:
        yield f"trainer.accelerator={name}: this machine has none; use trainer.accelerator=cpu"
    elif place.is_external and wanted > seen:
        started = f"{place.launcher} started {wanted} processes on each node, and this one sees {_counted(seen, 'GPU')}"
        yield f"{started}: each process needs its own GPU; {LAUNCHERS[place.launcher].fewer.format(seen, wanted)}"
    elif wanted > seen:
        on_cpu = "" if named else f", or trainer.accelerator=cpu for {wanted} processes on the CPU"
        yield f"trainer.devices={devices}: this machine has {_counted(seen, 'GPU')}; use trainer.devices={seen}{on_cpu}"
    elif named and max(named) >= seen:
        found = f"this machine has {_counted(seen, 'GPU')}, numbered from 0"
        yield f"trainer.devices={devices}: {found}; use numbers below {seen}"


def idle(used: int, place: Placement, there: Present | None = None) -> Iterator[str]:
    """Yield a line if srun has started fewer processes on this node than they see GPUs, of which some stay idle.

    Args:
        used: number of GPUs of this node that the run uses.
        there: accelerators of this machine; None to look them up.
    """
    is_alone = os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
    if (place.launcher == "slurm" or is_alone) and used < (seen := (there or present()).cuda):
        words = f"{f'trainer.devices={seen}, or ' if is_alone else ''}srun --ntasks-per-node={seen}"
        found = f"this node has {_counted(seen, 'GPU')}, and the run uses {used}: srun has started no more processes"
        yield f"{found}; type {words}"


def compiler_problems(compile: Mapping[str, Any] | None, accelerator: str) -> Iterator[str]:
    """Yield the tool that inductor needs to build its kernels, if it is missing."""
    if not compile or compile.get("backend", "inductor") != "inductor":
        return
    variable, default = ("CXX", "g++") if accelerator in ("cpu", "mps") else ("CC", "gcc")
    if accelerator == "cuda" and importlib.util.find_spec("triton") is None:
        yield "on a GPU, compile=true needs triton, which is not installed; type pip install triton"
    elif sys.platform == "linux" and shutil.which(compiler := os.environ.get(variable) or default) is None:
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
