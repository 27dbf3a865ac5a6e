"""Device counts of a run, and checks of its devices and of the processes started by torchrun, srun or the user."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.errors import nearest

_AS_MANY_AS_THERE_ARE = ("auto", -1, "-1")
_NAMES = ("auto", "gpu", "cuda", "mps", "cpu")
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of inductor
_FEWER = {  # by launcher: how to start fewer processes on a node, or let each see more GPUs
    "slurm": "use --ntasks-per-node={}, or --gpus-per-node={} in place of --gpus-per-task",
    "torchrun": "use --nproc-per-node={}, or list {} GPUs in CUDA_VISIBLE_DEVICES",
    "env": "export LOCAL_WORLD_SIZE={} and start that many ranks, or list {} GPUs in CUDA_VISIBLE_DEVICES",
}


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
        started = f"{place.launcher} started {wanted} processes on each node, and this one sees {_gpus(seen)}"
        yield f"{started}: each process needs its own GPU; {_FEWER[place.launcher].format(seen, wanted)}"
    elif wanted > seen:
        on_cpu = "" if named else f", or trainer.accelerator=cpu for {wanted} processes on the CPU"
        yield f"trainer.devices={devices}: this machine has {_gpus(seen)}; use trainer.devices={seen}{on_cpu}"
    elif named and max(named) >= seen:
        yield f"trainer.devices={devices}: this machine has {_gpus(seen)}, numbered from 0; use numbers below {seen}"


def idle(used: int, place: Placement, there: Present | None = None) -> Iterator[str]:
    """Yield a line if srun has started fewer processes on this node than they see GPUs, of which some stay idle.

    Args:
        used: number of GPUs of this node that the run uses.
        there: accelerators of this machine; None to look them up.
    """
    is_alone = os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
    if place.launcher != "slurm" and not is_alone:
        return
    seen = (there or present()).cuda
    if used < seen:
        words = (
            f"trainer.devices={seen}, or srun --ntasks-per-node={seen}"
            if is_alone
            else f"srun --ntasks-per-node={seen}"
        )
        yield f"this node has {_gpus(seen)}, and the run uses {used}: srun has started no more processes; type {words}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def compiler_problems(cfg: dict[str, Any], accelerator: str) -> Iterator[str]:
    """Yield the reasons why the model can't be compiled as configured.

    Args:
        cfg: the whole config, resolved.
        accelerator: the one in use.
    """
    node = cfg.get("compile") or {}
    if not node:
        return
    if node.get("units") is not None and node.get("scope", "units") != "units":
        yield f"compile.units={node['units']} and compile.scope={node['scope']}: leave one of them out"
    strategy = cfg["trainer"].get("strategy")
    if node.get("scope") == "whole" and isinstance(strategy, dict) and strategy.get("stage") == 3:
        yield "compile.scope=whole: at ZeRO stage 3 the graph would break at each layer; leave it out"
    if node.get("backend", "inductor") == "inductor":
        yield from _without_compiler(accelerator)
        if accelerator == "cuda" and node.get("mode") in _WITH_CUDA_GRAPHS and _gathers(strategy):
            # pytorch/pytorch#183451
            yield (
                f"compile.mode={node['mode']}: CUDA graphs need parameters at fixed addresses, but the strategy "
                "gathers them at a new address each time, so graphs would be recorded again and again; leave it out, "
                "type compile.mode=max-autotune-no-cudagraphs, or use strategy=ddp"
            )
    elif node.get("mode", "default") != "default":
        yield (
            f"compile.mode={node['mode']} is an option of inductor, but compile.backend={node['backend']}; "
            "leave one of them out"
        )


def _gathers(strategy: object) -> bool:
    """Return whether a strategy gathers the parameters of each unit before the unit computes."""
    if not isinstance(strategy, dict):
        return False
    name = str(strategy.get("_target_")).rpartition(".")[2]
    return name in ("FSDP", "TensorParallel") or (name == "DeepSpeed" and strategy.get("stage") == 3)


def _without_compiler(accelerator: str) -> Iterator[str]:
    """Yield the tools that inductor needs to build its kernels, and that are missing."""
    if accelerator not in ("cpu", "mps") and importlib.util.find_spec("triton") is None:
        yield "on a GPU, compile=true needs triton, which is not installed; type pip install triton"
    variable, default = ("CXX", "g++") if accelerator in ("cpu", "mps") else ("CC", "gcc")
    if sys.platform == "darwin":
        default = "clang++"
    compiler = os.environ.get(variable) or default
    if shutil.which(compiler) is None:
        yield (
            f"compile=true needs a compiler, and there is no {compiler} here; type apt-get install {default}, or "
            f"export {variable}=PATH of another, or, to compile without one, compile.backend=aot_eager"
        )
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "compile=true needs Python.h; type apt-get install python3-dev, or compile.backend=aot_eager"


_OPTIONS = {  # by launcher: what sets the numbers of nodes, and of processes on each
    "slurm": ("--nodes={}", "--ntasks-per-node={}"),
    "torchrun": ("--nnodes={}", "--nproc-per-node={}"),
    "env": ("GROUP_WORLD_SIZE={}", "LOCAL_WORLD_SIZE={}"),
}
_MPI_SIZES = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}  # of Open MPI; of MPICH, Intel MPI and Cray
_DETECT = "lightswitch.cluster.environments.detect"


def other_counts(trainer: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield a problem if the processes that were started do not match the Trainer's nodes and devices."""
    nodes, per_node = trainer["num_nodes"], count(trainer)
    if not place.is_external:
        yield from _elsewhere({"NODE_RANK": nodes, "LOCAL_RANK": per_node})
    if not place.is_external or (place.nodes, place.devices_per_node) == (nodes, per_node):
        return
    started = f"{_counted(place.nodes, 'node')} × {_counted(place.devices_per_node, 'process')}"
    if place.uneven:
        started = f"{place.uneven} processes on {place.nodes} nodes, {place.devices_per_node} of them here"
    wanted = zip(_OPTIONS[place.launcher], (place.nodes, place.devices_per_node), (nodes, per_node), strict=True)
    options = " ".join(option.format(count) for option, found, count in wanted if found != count)
    yield (
        f"{place.launcher} started {started}, but the trainer has num_nodes={nodes}, devices={per_node}; start it with "
        f"{options}, or leave both out to train on what was started"
    )


def _elsewhere(counts: dict[str, int]) -> Iterator[str]:
    """Yield environment variables that give this process a rank outside of the run.

    Lightning trusts them, and would train without any output or checkpoint.
    """
    arguments = {"NODE_RANK": "trainer.num_nodes", "LOCAL_RANK": "trainer.devices"}
    for name, count in counts.items():
        if int(os.environ.get(name, 0)) >= count:
            message = f"{name}={os.environ[name]} and {arguments[name]}={count}"
            yield f"{message}: found a rank that is not in this run; type unset {name}, or give {arguments[name]}"


def _counted(count: int | None, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def absent_processes(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield a problem if `cluster` names a launcher that did not start this process."""
    name = str((cfg.get("cluster") or {}).get("_target_")).rpartition(".")[2]
    wanted = {"TorchElasticEnvironment": "torchrun", "SLURMEnvironment": "slurm"}.get(name)
    found = place.launcher
    if wanted and wanted != found:
        starter = {"torchrun": "torchrun --nproc-per-node=N train.py", "slurm": "srun python train.py"}[wanted]
        yield f"cluster={wanted}, but {wanted} did not start this process; start it with {starter} or leave cluster out"


def started_twice(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield a problem if a launcher has started the ranks that the strategy would spawn."""
    strategy = cfg["trainer"].get("strategy")
    spawns = isinstance(strategy, dict) and strategy.get("start_method") == "spawn"
    if spawns and place.launcher in ("torchrun", "slurm"):
        starter = {"torchrun": "torchrun", "slurm": "srun"}[place.launcher]
        yield f"strategy=ddp_spawn starts the ranks itself, and {starter} has started them; use strategy=ddp"


def unstarted(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield a problem if a run has several nodes, but nothing starts processes on the others or names the first node.

    The process would wait for the others until `meet_timeout_seconds` have passed.
    """
    nodes = cfg["trainer"]["num_nodes"]
    if nodes > 1 and not (place.is_external or _is_named(cfg) or os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}):
        yield (
            f"trainer.num_nodes={nodes}: no launcher has started the processes of {_counted(nodes, 'node')}; start it "
            "with srun or torchrun, and leave trainer.num_nodes out, or start it on each node by the same command with "
            "cluster=manual cluster.node_rank=N cluster.main_address=FIRST_NODE"
        )


def separate(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    """Yield a problem if MPI started several processes, of which each would be a whole run of its own.

    One process that MPI started is fine, and so are processes that srun, torchrun, exported variables or a cluster's
    config join into one run: srun sets the variables of MPI, too.
    """
    if place.is_external or _is_named(cfg):
        return
    counts = {starter: os.environ.get(size, "1") for starter, size in _MPI_SIZES.items()}
    if found := next((starter for starter in counts if counts[starter] != "1"), None):
        size, count = _MPI_SIZES[found], counts[found]
        yield (
            f"{size}={count}: {found} started {count} processes, and each would be a run of its own; type python "
            "train.py trainer.devices=N, which starts a machine's processes itself, or start them with torchrun or "
            "srun, or export RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for each; if no MPI started this process, "
            f"type unset {size}"
        )


def _is_named(cfg: dict[str, Any]) -> bool:
    """Return whether the config names a cluster other than the default, which looks for a launcher."""
    return str((cfg.get("cluster") or {}).get("_target_", _DETECT)) != _DETECT


def unfit_for_changes() -> Iterator[str]:
    """Yield a problem if torchrun would not survive a change of its nodes.

    By default, the agents of torch 2.4 to 2.13 reuse the rendezvous address of the first group of nodes: a node that
    joins waits for it, and if the node of rank 0 is lost, all others wait for it, until they time out.
    """
    nodes = elastic_nodes()
    if nodes is not None and os.environ.get(NO_SHARED_STORE) != "1":
        yield (
            f"torchrun --nnodes={nodes[0]}:{nodes[-1]}: the run would time out after a minute when a node joins, or "
            f"when the node of rank 0 is lost; type export {NO_SHARED_STORE}=1 on every node before torchrun"
        )
