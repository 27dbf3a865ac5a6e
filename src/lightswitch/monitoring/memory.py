"""Memory that this process has taken so far."""

from __future__ import annotations

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors took on a CUDA device; elsewhere, that the process took on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    units_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units_bytes
