"""What the measurements of measured/gpu.md were made on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import yaml

from tests.engine.conftest import CHECKOUT

PACKAGES = ("torch", "lightning", "pytorch-lightning", "deepspeed", "hydra-core", "torchmetrics", "numpy")


def described(devices: int) -> dict[str, Any]:
    """Return so many GPUs and the versions: two machines of the same description give the same numbers."""
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(devices)],
        "gib": [round(memory_bytes(index) / 2**30) for index in range(devices)],
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": _nccl(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: found for package in PACKAGES if (found := _version(package)) is not None},
    }


def commit() -> str:
    """Return the commit of the checkout; "unknown" where there is none, as in a copy of the files."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def peak_flops(card: str) -> float | None:
    """Return the bfloat16 operations a second that a card can do, by its sheet; None for one that has none."""
    sheets = [yaml.safe_load(path.read_text()) for path in (CHECKOUT / "conf" / "device").glob("*.yaml")]
    tflops = {str(sheet["name"]): sheet["tflops"].get("bf16") for sheet in sheets if "name" in sheet}
    named = [name for name in tflops if all(word in card for word in name.split())]
    peak = tflops.get(max(named, key=len, default=""))
    return 1e12 * peak if peak else None


def memory_bytes(index: int) -> int:
    """Return all the memory of a GPU."""
    return int(torch.cuda.get_device_properties(index).total_memory)


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.splitlines()[0].strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
