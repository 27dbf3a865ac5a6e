"""Memory that this process has taken so far."""

from __future__ import annotations

import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors took on a CUDA device; elsewhere, that the process took on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    units_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units_bytes
