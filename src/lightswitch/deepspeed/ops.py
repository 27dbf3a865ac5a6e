"""Whether an operator that DeepSpeed compiles at its first use is there. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_BUILDERS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder"}


def problems(op: str, purpose: str) -> Iterator[str]:
    """Why a run that needs it can't start now: it is not built, or its build was cut short and left a lock to wait for.

    A build takes minutes, in each process, without a word: so a person starts it.
    """
    locks = [path for path in _folders(op) if path.name == op and (path / "lock").exists()]
    if locks:
        yield (
            f"{purpose} needs DeepSpeed's {op}, and {locks[0] / 'lock'} says that it is being built; "
            f"wait, or, if nothing builds it, rm {locks[0] / 'lock'}"
        )
    elif not any(path.glob(f"{op}*.so") for path in _folders(op)):
        yield (
            f"{purpose} needs DeepSpeed's {op}, which is not built here; build it once, which takes minutes: "
            f"python -c 'from deepspeed.ops.op_builder import {_BUILDERS[op]} as B; B().load()'"
            + (" (needs libaio: apt-get install libaio-dev)" if op == "async_io" else "")
        )


def _folders(op: str) -> Iterator[Path]:
    """Where torch keeps what it has compiled, and DeepSpeed what it was installed with."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "torch_extensions")
    yield from (path for path in (root / op, *root.glob(f"*/{op}")) if path.is_dir())
    spec = importlib.util.find_spec("deepspeed")
    if spec is not None and spec.origin:
        yield from (path.parent for path in Path(spec.origin).parent.glob(f"ops/**/{op}*.so"))
