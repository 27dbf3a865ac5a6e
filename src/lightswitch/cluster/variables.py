"""The environment variables that reports may show: no others, because they may hold passwords."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
_THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")
_TORCH = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE",),
    *(f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DUMP_ON_TIMEOUT")),
    *(f"TORCH_NCCL_{name}" for name in ("ENABLE_MONITORING", "HEARTBEAT_TIMEOUT_SEC", "TRACE_BUFFER_SIZE")),
)
_NCCL = (
    *("ALGO", "CUMEM_ENABLE", "DEBUG", "DEBUG_SUBSYS", "IB_DISABLE", "IB_GID_INDEX", "IB_HCA", "IB_TIMEOUT", "NET"),
    *("NET_GDR_LEVEL", "NVLS_ENABLE", "P2P_DISABLE", "P2P_LEVEL", "PROTO", "SHM_DISABLE", "SOCKET_IFNAME"),
)
_SLURM = (
    *("ARRAY_JOB_ID", "ARRAY_TASK_ID", "CPUS_ON_NODE", "CPUS_PER_TASK", "GPUS_ON_NODE", "GPUS_PER_NODE", "JOB_ID"),
    *("JOB_NODELIST", "LOCALID", "NNODES", "NODEID", "NTASKS", "PROCID", "RESTART_COUNT", "STEP_ID", "STEP_NODELIST"),
    *("STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"),
)
_PREFIXED = (*(f"NCCL_{name}" for name in _NCCL), *(f"SLURM_{name}" for name in _SLURM))
SHOWN = frozenset((*_RANKS, *_RENDEZVOUS, *_DEVICES, *_THREADS, *_TORCH, *_PREFIXED))
_PLAIN = re.compile(r"(?!.*://)[\w.,:;=/+*^()\[\] -]{0,200}")  # names, numbers and lists of them: no URL, no user@host


def shown(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are set, with `(not shown)` for values that may be URLs or logins."""
    found = {name: environ[name] for name in sorted(SHOWN & environ.keys())}
    return {name: value if _PLAIN.fullmatch(value) else "(not shown)" for name, value in found.items()}
