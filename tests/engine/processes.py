"""Processes as a user starts them, each in a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lightswitch.cluster.environments import reserve_port
from tests.runs import CHECKOUT

TRAIN_PY = str(CHECKOUT / "train.py")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process in a session of its own, which ends with the test and takes all that it started with it."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, **environment: str) -> subprocess.Popen[str]:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "CUDA_VISIBLE_DEVICES") if name in os.environ}
        paths = f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"  # also where another checkout's engine is installed
        environ = inherited | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):  # torchrun's have sessions of their own
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """All that it has said when it has ended."""
    assert process.stdout is not None
    out = process.stdout.read()
    process.wait()
    return out


def shown_by(controller: int, is_enough: Callable[[str], bool], timeout_seconds: float = 300) -> str:
    """What a terminal shows until it is enough, or for so long."""
    shown, end = "", time.monotonic() + timeout_seconds
    while not is_enough(shown) and time.monotonic() < end:
        if select.select([controller], [], [], 0.1)[0]:
            try:
                shown += os.read(controller, 4096).decode(errors="replace")
            except OSError:  # Linux's way to say that the other end is closed
                break
    return shown


@pytest.fixture
def port() -> Iterator[str]:
    with reserve_port() as held:
        yield str(held.getsockname()[1])
