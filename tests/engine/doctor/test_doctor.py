"""The doctor of one machine; tests/nightly has it among others."""

from __future__ import annotations

import os
import subprocess

from tests.engine.conftest import CHECKOUT

DOCTOR = ("-m", "lightswitch.doctor", "--timeout", "300")


def asked_of(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(["python", *command], cwd=CHECKOUT, env=environ, capture_output=True, text=True)


def test_alone_it_tells_what_the_machine_has() -> None:
    asked = asked_of(*DOCTOR)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "CPU cores" in asked.stdout
    assert asked.stdout.endswith("no problem was found\n")
