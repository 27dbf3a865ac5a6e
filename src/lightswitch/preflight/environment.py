"""Checks of the environment variables that launchers set, and of the versions of installed packages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from lightswitch import versions
from lightswitch.cluster import placement
from lightswitch.errors import RefusedRequest

_LEAST = {  # integers, each with its smallest valid value
    **dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "JSM_NAMESPACE_RANK"), 0),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), 0),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), 1),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"), 1),
    **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"), 1),
}
_PORTS = ("MASTER_PORT", "STANDALONE_PORT")
_FORMS = {  # other variables, each with a pattern and its description
    "MASTER_ADDR": (r"\S+", "a host's name or address"),
    "OMP_NUM_THREADS": (r"(\d*[1-9]\d*(,\d*[1-9]\d*)*)?", "a number of threads from 1"),
    "CUDA_VISIBLE_DEVICES": (
        r"|none|NoDevFiles|(-?\d+|(GPU|MIG)-[\w/-]+)(\s*,\s*(-?\d+|(GPU|MIG)-[\w/-]+))*",
        "numbers of GPUs such as 0,1, or their UUIDs",
    ),
}
_NEEDED = {  # by launcher: the variables that each process needs
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "env": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "slurm": ("SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
}
_SIGNS = {  # by launcher: the variables that reveal it, and how to use it
    "torchrun": (("TORCHELASTIC_RUN_ID",), "start it with torchrun --nproc-per-node=N train.py"),
    "env": (("RANK", "WORLD_SIZE"), f"export {', '.join(_NEEDED['env'])} for each process"),
    "slurm": (("SLURM_STEP_NUM_TASKS",), "start it with srun python train.py"),
}
_BELOW = {  # by launcher: variables that must be below others
    "torchrun": {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE", "GROUP_RANK": "GROUP_WORLD_SIZE"},
    "env": {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE", "GROUP_RANK": "GROUP_WORLD_SIZE"},
    "slurm": {"SLURM_PROCID": "SLURM_STEP_NUM_TASKS", "SLURM_NODEID": "SLURM_STEP_NUM_NODES"},
    "local": {"LOCAL_RANK": "WORLD_SIZE"},
}
_ORDERED = {  # by launcher: global rank, node rank and local rank
    "torchrun": ("RANK", "GROUP_RANK", "LOCAL_RANK"),
    "env": ("RANK", "NODE_RANK", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),
}
_MEND = {
    "torchrun": "start it with torchrun, which exports all of them",
    "env": "export LOCAL_WORLD_SIZE, the number of processes on a node, and leave out the others",
    "slurm": "start it with srun --distribution=block",
}
_OF_TORCHRUN = ("RANK", "GROUP_RANK", "LOCAL_RANK")  # what env needs where nodes have different numbers of processes
_ORDERED_UNEVENLY = {**_ORDERED, "env": _OF_TORCHRUN}
_COUNTS = {  # the numbers of processes and nodes, which tell the place of a process on such nodes
    **dict.fromkeys(("torchrun", "env"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")),
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"),
}
_MEND_UNEVENLY = {
    **_MEND,
    "env": "export LOCAL_RANK (the number of the process on its node, from 0), GROUP_RANK (the node's) and "
    "GROUP_WORLD_SIZE (how many nodes there are) for each process",
}
_OF_ACCELERATE = {  # what `accelerate launch` exports, its default, and the keys that do the same
    "ACCELERATE_MIXED_PRECISION": ("no", "precision"),
    "ACCELERATE_USE_CPU": ("false", "trainer.accelerator"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "compile"),
    "ACCELERATE_USE_FSDP": ("false", "strategy"),
    "ACCELERATE_USE_DEEPSPEED": ("false", "strategy"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "trainer.gradient_clip_val"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "micro_batch_size"),
}
_INDEX = "https://download.pytorch.org/whl"
_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+|xpu")  # PyTorch's builds, after the + of a version


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Check the environment variables that launchers set.

    Lightning, torch and DeepSpeed use them unchecked: as numbers, or as a rank among processes that may not exist.

    Raises:
        RefusedRequest: with all problems, one line each.
    """
    problems = list(_malformed(environ)) or list(_misplaced(environ))
    if "${" in (folder := os.getcwd()):
        problems.append(f"the folder {folder} has ${{ in its name, which a config takes for a reference; rename it")
    if problems:
        raise RefusedRequest(problems)


def _malformed(environ: Mapping[str, str]) -> Iterator[str]:
    for name, least in _LEAST.items():
        if name in environ and not (_is_number(environ[name]) and int(environ[name]) >= least):
            yield _told(environ, name, f"a whole number from {least}")
    for name in _PORTS:
        if name in environ and not (_is_number(environ[name]) and 0 < int(environ[name]) < 2**16):
            yield _told(environ, name, "a port from 1 to 65535")
    for name, (form, expected) in _FORMS.items():
        if name in environ and not re.fullmatch(form, environ[name].strip()):
            yield _told(environ, name, expected)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _told(environ: Mapping[str, str], name: str, expected: str) -> str:
    return f"{name}: found {environ[name]!r}, expected {expected}; set a valid value, or type unset {name}"


def _misplaced(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield contradictions between variables that are each well-formed."""
    launcher = placement.launcher(environ)
    yield from (
        list(_incomplete(launcher, environ))
        or list(_beyond(launcher, environ))
        or list(_of_another_step(environ) if launcher == "slurm" else ())
        or list(_of_others(environ) if launcher == "local" else _out_of_order(launcher, environ))
    )
    if launcher != "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield _left_over(environ, "TORCHELASTIC_USE_AGENT_STORE", "torchrun did not start this process")
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" not in environ:
        yield _left_over(
            environ, "SLURM_ARRAY_JOB_ID", "there is no SLURM_ARRAY_TASK_ID, which each task of an array has"
        )


def _incomplete(launcher: str, environ: Mapping[str, str]) -> Iterator[str]:
    missing = [name for name in _NEEDED.get(launcher, ()) if name not in environ]
    if not missing:
        return
    names, mend = _SIGNS[launcher]
    yield f"{_set(environ, names)}: there is no {', '.join(missing)}; {mend}, or type {_unset(launcher, environ)}"


def _beyond(launcher: str, environ: Mapping[str, str]) -> Iterator[str]:
    counts = {"LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE", "1"), **environ}
    for name, count in _BELOW[launcher].items():
        if name in counts and count in counts and int(counts[name]) >= int(counts[count]):
            yield f"{_set(counts, (name, count))}: export a {name} from 0 to {int(counts[count]) - 1}"
    if launcher in ("torchrun", "env") and int(counts["LOCAL_WORLD_SIZE"]) > int(counts["WORLD_SIZE"]):
        message = _set(counts, ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        yield f"{message}: a node can't have more processes than all nodes; export a smaller LOCAL_WORLD_SIZE"


def _of_another_step(environ: Mapping[str, str]) -> Iterator[str]:
    tasks, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
    mend = f"{_SIGNS['slurm'][1]}, or type {_unset('slurm', environ)}"
    if int(environ["SLURM_NTASKS"]) != tasks:
        yield f"{_set(environ, ('SLURM_NTASKS', 'SLURM_STEP_NUM_TASKS'))}: srun sets both to the same value; {mend}"
    if nodes > tasks:
        yield f"{_set(environ, ('SLURM_STEP_NUM_NODES', 'SLURM_STEP_NUM_TASKS'))}: a node has at least one task; {mend}"
    if "MASTER_PORT" not in environ and not _is_number(environ.get("SLURM_JOB_ID", "0")[-4:]):
        yield f"{_set(environ, ('SLURM_JOB_ID',))}: expected a number, which determines the port; {mend}"
    if nodes > 1 and not environ.keys() & {"MASTER_ADDR", "SLURM_NODELIST"}:
        yield f"{_set(environ, ('SLURM_STEP_NUM_NODES',))}: there is no SLURM_NODELIST, for the first node; {mend}"


def _out_of_order(launcher: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if the ranks are not numbered node by node.

    Lightning, and strategies that shard over the devices of a node, rely on that order.
    """
    place = placement.detect(environ)
    rank, node, local = _ORDERED[launcher]
    per_node = place.devices_per_node or 1
    if place.uneven:
        yield from _out_of_uneven_order(launcher, environ)
        return
    within = int(environ.get(local, place.rank % per_node))
    if int(environ.get(node, place.rank // per_node if launcher == "env" else 0)) * per_node + within != place.rank:
        message = _set(environ, [name for name in (rank, node, local) if name in environ])
        whole = f"{per_node} processes on each of {place.nodes} nodes"
        yield f"{message}: {whole} must be numbered node by node; {_MEND[launcher]}"


def _out_of_uneven_order(launcher: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if the place of a process is not known, or can't be, on nodes with different numbers of them."""
    counts, (rank, node, local) = _COUNTS[launcher], _ORDERED_UNEVENLY[launcher]
    if missing := [name for name in (*counts, rank, node, local) if name not in environ]:
        there = [name for name in counts if name in environ]
        yield (
            f"{_set(environ, there)}: nodes have different numbers of processes, and there is no {', '.join(missing)}; "
            f"{_MEND_UNEVENLY[launcher]}"
        )
        return
    place = placement.detect(environ)
    # Ranks on this node, on lower ones and on higher ones.
    here = place.devices_per_node or 1
    lower = int(environ[rank]) - int(environ[local])
    higher = (place.uneven or 1) - lower - here
    number = int(environ[node])
    after = place.nodes - 1 - number
    if launcher == "slurm":
        tasks = placement.tasks_of_nodes(environ)
        is_possible = len(tasks) == place.nodes and sum(tasks) == place.uneven and sum(tasks[:number]) == lower
    else:  # each of the other nodes has at least one process
        is_possible = lower >= number and (lower > 0) == (number > 0)
        is_possible = is_possible and higher >= after and (higher > 0) == (after > 0)
    if not is_possible or int(environ[local]) >= here:
        message = _set(environ, (*counts, rank, node, local))
        yield f"{message}: processes must be numbered node by node; {_MEND_UNEVENLY[launcher]}"


def _of_others(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield variables that give this process a rank, although no launcher has started other processes.

    Lightning trusts them: the process would print nothing, write no checkpoint, or wait for the other ranks.
    """
    if placement.is_child(environ):
        return
    if environ.get("RANK") == "0" and environ.get("WORLD_SIZE") == "1":  # inherited from a run of one process
        return
    if placed := [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK") if name in environ]:
        missing = [name for name in _NEEDED["env"] if name not in environ]
        mend = f"type unset {' '.join(placed)}, or {_SIGNS['env'][1]}"
        yield f"{_set(environ, placed)}: there is no {', '.join(missing)}; {mend}"
    if int(environ.get("NODE_RANK", 0)) > 0 and not environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
        yield (
            f"{_set(environ, ('NODE_RANK',))}: there is no MASTER_ADDR, MASTER_PORT; "
            "export them on each node, or type unset NODE_RANK"
        )
    for name, starter in (("SLURM_PROCID", "srun"), ("JSM_NAMESPACE_RANK", "jsrun")):
        if int(environ.get(name, 0)) > 0:
            yield _left_over(environ, name, f"{starter} started no other process of this run")


def _left_over(environ: Mapping[str, str], name: str, why: str) -> str:
    return f"{_set(environ, (name,))}: {why}; type unset {name}"


def _unset(launcher: str, environ: Mapping[str, str]) -> str:
    prefixes = {"torchrun": ("TORCHELASTIC_",), "slurm": ("SLURM_STEP_",), "env": ("RANK", "WORLD_SIZE")}[launcher]
    return f"unset {' '.join(sorted(name for name in environ if name.startswith(prefixes)))}"


def _set(environ: Mapping[str, str], names: Sequence[str]) -> str:
    shown = (f"{environ[name]}" if re.fullmatch(r"[\w.:-]+", environ[name]) else repr(environ[name]) for name in names)
    return " and ".join(f"{name}={value}" for name, value in zip(names, shown, strict=True))


def of_accelerate(
    typed: Set[str], accelerator: Callable[[], str], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield a problem for what `accelerate launch` has exported, and a run would pass over.

    Args:
        typed: the keys on the command line, which decide.
        accelerator: returns the one in use, cpu, cuda or mps, which may have to import torch.
    """
    asked = {
        name: keys
        for name, (default, keys) in _OF_ACCELERATE.items()
        if environ.get(name, default).lower() not in (default, "auto") and not any(key in typed for key in keys.split())
    }
    if "ACCELERATE_USE_CPU" in asked and accelerator() == "cpu":
        del asked["ACCELERATE_USE_CPU"]
    if asked:
        keys = dict.fromkeys(" ".join(asked.values()).split())
        yield (
            f"{_set(environ, [*asked])}: accelerate launch has exported what a run takes from its config; type "
            f"{' '.join(f'{key}=VALUE' for key in keys)}"
        )


def unfit_packages() -> Iterator[str]:
    """Yield a problem if torchvision is built for another torch; torchmetrics imports torchvision in every run."""
    found = versions.of(("torch", "torchvision"))
    if len(found) == 2:
        yield from apart(found, versions.required_by("torchvision"))


def apart(found: Mapping[str, str], requirements: Sequence[str]) -> Iterator[str]:
    """Yield a problem if torch and torchvision are not built for each other.

    Args:
        found: versions of torch and torchvision.
        requirements: of torchvision, from its metadata.
    """
    torch, _, build = found["torch"].partition("+")
    build_of_vision = found["torchvision"].partition("+")[2]
    needed = next((one[1] for text in requirements if (one := re.match(r"torch *\(?== *([\d.]+)", text))), None)
    of_another = needed is not None and torch.split(".")[:2] != needed.split(".")[:2]
    is_known = all(not one or _BUILD.fullmatch(one) for one in (build, build_of_vision))
    if not of_another and (not is_known or build == build_of_vision):
        return
    major, minor = (int(number) for number in torch.split(".")[:2])
    wanted = f"torchvision==0.{minor + 15}.*" if major == 2 else "torchvision"  # 2.8 with 0.23, and so on
    index = f" --index-url {_INDEX}/{build}" if _BUILD.fullmatch(build) else ""
    kind = f"torch {needed}" if of_another else f"the {build_of_vision or 'PyPI'} build of torch"
    yield (
        f"torchvision {found['torchvision']} is built for {kind}, but torch {found['torch']} is installed; type "
        f"pip install --force-reinstall --no-deps '{wanted}'{index}"
    )
