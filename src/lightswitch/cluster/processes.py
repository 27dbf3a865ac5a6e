"""The processes of a run and the group they form."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

ranks: list[subprocess.Popen[bytes]] = []  # that this process has started; it is rank 0 of its node
_PATIENCE_SECONDS = 10.0  # for ranks of a failed run, which write what they know of it
_GRACE_SECONDS = 20.0  # for a rank that is asked to end: a step and a checkpoint
are_watched = threading.Event()  # the ranks, by one another
last_acts: list[Callable[[], None]] = []  # of a process that ends at once
have_failed = threading.Event()  # the ranks, as all of them know: each ends with the exit code of that
steps_have_begun = threading.Event()  # of this process's run: from then on, an error is no mistake in what was asked


def leave_group_at_exit() -> None:
    """Lightning ends NCCL groups only; the threads of gloo, left running, can abort a finished process as it exits."""
    atexit.register(_leave_group)


def _leave_group() -> None:
    for name in ("deepspeed.comm", "torch.distributed"):  # DeepSpeed keeps groups of its own beside the world's
        comm = sys.modules.get(name)
        if comm is not None and comm.is_available() and comm.is_initialized():
            comm.destroy_process_group()


def how_ended(pid: int) -> str | None:
    """Of a process in `ranks`; None while it runs, and of any other."""
    code = next((rank.poll() for rank in ranks if rank.pid == pid), None)
    if code is None:
        return None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_ranks() -> None:
    """Of a run that has failed: first they may end by themselves."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that the workers below were killed
    end = time.monotonic() + _PATIENCE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
    for worker in multiprocessing.active_children():
        worker.kill()


def leave_now(code: int) -> NoReturn:
    """Not by an exception: the main thread may be in a collective that never returns."""
    import psutil  # at the end alone: it takes its time to import

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    for pid in children:  # at once: of loader workers that are gone, torch tells in the main thread
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for act in last_acts:
        act()
    os._exit(code)


def follow_parent() -> None:
    """End this rank when the process that started it has ended, until the ranks watch one another: it would wait for
    that one for half an hour."""
    parent = os.getppid()

    def follow() -> None:
        while not are_watched.wait(1):
            if os.getppid() != parent:
                if os.environ["LOCAL_RANK"] == "1":  # one line for all
                    print(f"rank 0 failed: process {parent} was killed before it trained", file=sys.stderr, flush=True)
                leave_now(1)

    threading.Thread(target=follow, name="follow parent", daemon=True).start()


def end_with_parent() -> None:
    """Of a rank that Python started. torch sends it SIGINT once its parent is gone, and a job in the background ignores
    that."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        leave_now(128 + signal.SIGTERM)

    threading.Thread(target=follow, name="follow parent", daemon=True).start()
