"""Operators that DeepSpeed compiles at their first use, and whether they are there. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_BUILDERS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder"}


def problems(op: str, purpose: str) -> Iterator[str]:
    """Yield why a run that needs an operator can't start: it is not built, or its build left a lock to wait for.

    A build takes minutes, in each process, without a word: so a person starts it.

    Args:
        op: DeepSpeed's name for it: async_io, cpu_adam or fused_adam.
        purpose: what needs it, as the message begins.
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
    """Yield where torch keeps what it has compiled, and where DeepSpeed was installed with operators."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "torch_extensions")
    yield from (path for path in (root / op, *root.glob(f"*/{op}")) if path.is_dir())
    spec = importlib.util.find_spec("deepspeed")
    if spec is not None and spec.origin:
        yield from (path.parent for path in Path(spec.origin).parent.glob(f"ops/**/{op}*.so"))
