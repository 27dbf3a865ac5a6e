"""Printing once what every process of a launcher has found, before the processes are connected."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from lightswitch.errors import Refused, printable
from lightswitch.process import signals
from lightswitch.trees import make_tree, remove_tree

_PATIENCE_SECONDS = 3.0  # for the others, which have started together
_POLL_SECONDS = 0.02


def print_once(lines: str) -> bool:
    """Print lines to standard error unless another process of the same start has, and return whether this one did.

    The first process makes a folder in the working directory, and waits until the others have seen it: once a process
    ends, its launcher kills the rest, and their exit codes are lost.
    """
    lines, processes = printable(lines), _started_together(os.environ)
    if processes is None:
        print(lines, file=sys.stderr, flush=True)
        return True
    signals.ignore()
    together, count = processes
    folder = Path(f".lightswitch_{blake2b(together.encode(), digest_size=8).hexdigest()}")
    end = time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(OSError):  # no permission to write here: each process prints it
        if not _is_first(folder) and _has_printed(folder, end):
            return False
    print(lines, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, Refused):
        # the mark that make_tree leaves counts for this process
        while len(list(folder.iterdir())) < count and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        remove_tree(folder)
    return True


def _is_first(folder: Path) -> bool:
    try:
        make_tree(folder)
    except FileExistsError:
        return False
    return True


def _has_printed(folder: Path, end: float) -> bool:
    """Return whether the first process removes its folder in time; else it was killed, and may have printed nothing."""
    (folder / str(os.getpid())).touch()
    while folder.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _started_together(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return a text shared by all processes of one command, and their number; None for a single process."""
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
