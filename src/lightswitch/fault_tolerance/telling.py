"""One line for a mistake that each process of a launcher has found, before they could agree on who tells it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from lightswitch.errors import Refused
from lightswitch.process import signals
from lightswitch.trees import make_tree, remove_tree

_PATIENCE_SECONDS = 3.0  # for the others, which have started together
_POLL_SECONDS = 0.02


def once(lines: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Print lines to standard error, unless another process of the same start has done so; whether they are printed.

    The first one makes a folder where all of them see it, and waits there for the others: once one has ended, its
    launcher ends the rest, whichever exit code they would have had.
    """
    processes = _started_together(environ)
    if processes is None:
        print(lines, file=sys.stderr, flush=True)
        return True
    signals.ignore()
    together, count = processes
    folder = Path(f".lightswitch_{blake2b(together.encode(), digest_size=8).hexdigest()}")
    end = time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(OSError):  # nobody may write here: each tells it
        if not _is_first(folder) and _has_told(folder, end):
            return False
    print(lines, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, Refused):
        while len(list(folder.iterdir())) < count and time.monotonic() < end:  # the mark stands for this process
            time.sleep(_POLL_SECONDS)
        remove_tree(folder)
    return True


def _is_first(folder: Path) -> bool:
    try:
        make_tree(folder)
    except FileExistsError:
        return False
    return True


def _has_told(folder: Path, end: float) -> bool:
    """Whether the first one has removed its folder; else it was killed, and may have told nothing."""
    (folder / str(os.getpid())).touch()
    while folder.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _started_together(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """What the processes of one command have in common, and how many they are; None for one that is alone."""
    if "TORCHELASTIC_RUN_ID" in environ:
        together, count = f"{socket.gethostname()} {os.getppid()}", environ.get("LOCAL_WORLD_SIZE", "")
    elif "SLURM_STEP_ID" in environ:
        names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        together, count = " ".join(environ.get(name, "") for name in names), environ.get("SLURM_STEP_NUM_TASKS", "")
    elif "RANK" in environ:
        together, count = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}", environ.get("WORLD_SIZE", "")
    else:
        return None
    return (together, int(count)) if count.isdecimal() and int(count) > 1 else None
