"""What torch.compile needs of a machine. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def problems(cfg: dict[str, Any], accelerator: str) -> Iterator[str]:
    """Yield why a model can't be compiled.

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
        yield "compile.scope=whole: at ZeRO stage 3 a graph would end at each layer; leave it out"
    if node.get("backend", "inductor") == "inductor":
        yield from _without_compiler(accelerator)
    elif node.get("mode", "default") != "default":
        yield f"compile.mode={node['mode']} is inductor's, and compile.backend={node['backend']}; leave one of them out"


def _without_compiler(accelerator: str) -> Iterator[str]:
    """Yield what inductor lacks to build its kernels."""
    if accelerator not in ("cpu", "mps") and importlib.util.find_spec("triton") is None:
        yield "compile=true needs triton on a GPU, which is not installed; type pip install triton"
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
