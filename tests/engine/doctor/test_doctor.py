"""The doctor, alone and among others."""

from __future__ import annotations

import os
import socket
import subprocess

from tests.engine.conftest import CHECKOUT

DOCTOR = ("-m", "lightswitch.doctor", "--timeout", "20")


def _asked(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(["python", *command], cwd=CHECKOUT, env=environ, capture_output=True, text=True)


def test_alone_it_tells_what_the_machine_has() -> None:
    asked = _asked(*DOCTOR)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "CPU cores" in asked.stdout
    assert asked.stdout.endswith("no problem was found\n")


def test_two_processes_are_measured_and_told_of_once() -> None:
    asked = _asked("-m", "torch.distributed.run", "--nproc-per-node=2", *DOCTOR)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert asked.stdout.count("gloo, 16 MiB: ") == 1
    assert asked.stdout.startswith("processes   2, which meet at ")


def test_a_rank_that_does_not_come_is_a_problem() -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    exported = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}
    asked = _asked("-m", "lightswitch.doctor", "--timeout", "1", **exported)
    assert asked.returncode == 1
    assert asked.stdout.endswith("problem     rank 1 did not join within 1 s\n")
