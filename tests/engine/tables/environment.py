"""The page of the environment variables that the engine, the project and the job scripts read."""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Iterator
from pathlib import Path

from lightswitch.cluster.variables import SHOWN
from tests.engine.conftest import CHECKOUT
from tests.engine.tables.page import code, page, table

YOURS = {  # what a user may export
    "CUDA_VISIBLE_DEVICES": "the GPUs that a run may take; checked before torch is imported",
    "GLOO_SOCKET_IFNAME": "the network interface that the nodes share, for gloo; the doctor tells of it",
    "NCCL_SOCKET_IFNAME": "the same for NCCL",
    "OMP_NUM_THREADS": "threads of a process; the job scripts take a task's share of the cores",
    "OMP_WAIT_POLICY": "`PASSIVE` where nothing else is said: threads that wait leave the cores to other processes",
    "TORCH_LOGS": "torch's own logs; where it is set, the engine tells nothing of compilations by itself",
    "TORCH_EXTENSIONS_DIR": "where DeepSpeed's operators are built",
    "XDG_CACHE_HOME": "the cache in which they are built otherwise; `~/.cache` without it",
    "DS_ACCELERATOR": "DeepSpeed's device; `cpu` where there is no GPU and nothing else is said",
}
OF_LAUNCHERS = {
    "MASTER_ADDR": "torchrun, or you: the host of rank 0",
    "MASTER_PORT": "torchrun, or you: the port where they meet; under Slurm it follows from the job's number",
    "WORLD_SIZE": "torchrun, or you: processes in all",
    "RANK": "torchrun, or you: this process among all, from 0",
    "LOCAL_RANK": "torchrun, Lightning, or you: this process on its node, from 0, and so its device",
    "LOCAL_WORLD_SIZE": "torchrun, or you: processes on this node",
    "NODE_RANK": "Lightning, or you: this node among all, from 0",
    "GROUP_RANK": "torchrun: the same",
    "GROUP_WORLD_SIZE": "torchrun: nodes in all",
    "TORCHELASTIC_RUN_ID": "torchrun: `--rdzv-id`, which is the run's id; by it, torchrun is known",
    "TORCHELASTIC_RESTART_COUNT": "torchrun: how often it has started the processes again",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun: whether rank 0 meets the others in torchrun's own store",
    "TORCHELASTIC_ERROR_FILE": "torchrun: where a process leaves its error",
    "STANDALONE_PORT": "you: where processes that Lightning starts meet",
    "JSM_NAMESPACE_RANK": "IBM's jsrun: a rank, which Lightning would believe",
    "ENVIRONMENT": "Slurm: `BATCH` in a job's script, told from a shell by it",
    "SLURM_JOB_ID": "Slurm: the run's id, and what is requeued",
    "SLURM_ARRAY_JOB_ID": "Slurm: of an array; the run's id is `<array>_<task>`",
    "SLURM_ARRAY_TASK_ID": "Slurm: the same; the line of a sweep's overrides that this task takes",
    "SLURM_RESTART_COUNT": "Slurm: how often the job was requeued; an earlier start's lock is over by it",
    "SLURM_STEP_ID": "srun: its number in the job, for the run's id in an allocation",
    "SLURM_STEP_NUM_TASKS": "srun: its processes; by it, srun is known",
    "SLURM_STEP_NUM_NODES": "srun: its nodes",
    "SLURM_STEP_TASKS_PER_NODE": "srun: its processes on each",
    "SLURM_PROCID": "srun: this process among all, from 0",
    "SLURM_NODEID": "srun: this node among all, from 0",
    "SLURM_LOCALID": "srun: this process on its node, from 0",
    "SLURM_NTASKS": "Slurm: processes of the job",
    "SLURM_NTASKS_PER_NODE": "Slurm: the same on each node",
    "SLURM_NNODES": "Slurm: nodes of the job",
    "SLURM_NODELIST": "Slurm: their names, of which the first is rank 0's",
    "SLURM_JOB_NODELIST": "Slurm: the same, for torchrun's address",
    "SLURM_PTY_PORT": "srun `--pty`: a shell, whose runs are named by the clock",
    "SLURM_GPUS_PER_NODE": "Slurm: a task for each, in the job scripts",
    "SLURM_GPUS_ON_NODE": "Slurm: the same where the one before is not set",
    "SLURM_CPUS_ON_NODE": "Slurm: shared among the tasks of a node by the job scripts",
    "SLURM_CPUS_PER_TASK": "Slurm: cores of a task, and so its threads, in the job scripts",
    "SLURM_SUBMIT_DIR": "Slurm: the checkout that a job script works in",
}
SET = {  # for what the engine starts or imports
    "HYDRA_FULL_ERROR": "set to 1, so that a bug keeps its traceback and its exit code",
    "KINETO_LOG_LEVEL": "silences torch's profiler where nothing else is said",
}
OTHER_NAMES = {"TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"}  # of DeepSpeed's modules


def text() -> str:
    """Return the page.

    Raises:
        KeyError: a variable that is told of is read nowhere.
    """
    where = readers()
    return page(
        "The environment",
        "The environment variables that are read, and by which file of `src/lightswitch`, or script. What launchers "
        "export is checked before anything is imported that believes it: a value that means nothing, or one without "
        "the others, is told in a line ([On a cluster](../clusters.md)).",
        "## Yours to export",
        _rows(YOURS, where),
        "torch and NCCL have many more: [Debugging](../debugging.md#a-hang). Secrets, as `WANDB_API_KEY`, stay in the "
        "environment: [Security](../security.md#secrets). A config takes any variable by `${oc.env:NAME}`.",
        "## Of launchers",
        _rows(OF_LAUNCHERS, where),
        "## Set by the engine",
        _rows(SET, where),
        "## In reports",
        "Crash reports and the doctor show these, and no other: "
        + ", ".join(code(name) for name in sorted(SHOWN))
        + ".",
    )


def _rows(told: dict[str, str], where: dict[str, list[str]]) -> str:
    rows = ((code(name), sentence, ", ".join(map(code, where[name]))) for name, sentence in told.items())
    return table(("variable", "what it is", "read by"), rows)


def readers() -> dict[str, list[str]]:
    """Return the files that name each variable, by its name."""
    found: dict[str, list[str]] = {}
    engine = CHECKOUT / "src" / "lightswitch"
    for path in [*sorted(engine.rglob("*.py")), *sorted((CHECKOUT / "slurm").glob("*.sh"))]:
        if path.match("cluster/variables.py"):  # only what reports may show
            continue
        name = str(path.relative_to(engine if path.suffix == ".py" else CHECKOUT))
        for variable in sorted({*(_of_python(path) if path.suffix == ".py" else _of_shell(path))} - OTHER_NAMES):
            found.setdefault(variable, []).append(name)
    return found


def _of_python(path: Path) -> Iterator[str]:
    """Yield what looks like a variable, and is no opcode, in a file that reads any."""
    source = path.read_text()
    if not re.search(r"\benviron\b", source) and "IFNAME" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in dis.opmap:
            yield from re.findall(r"^(?:RANK|ENVIRONMENT|[A-Z0-9]+(?:_[A-Z0-9]+)+)$", node.value)
        elif isinstance(node, ast.keyword) and re.fullmatch("[A-Z]+_[A-Z_]+", node.arg or ""):
            yield str(node.arg)


def _of_shell(path: Path) -> Iterator[str]:
    yield from re.findall(r"(?:\$\{?|\(\()((?:SLURM|TORCH|OMP)_[A-Z_]+)", path.read_text())
