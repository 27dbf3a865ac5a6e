"""The doctor of one machine; tests/nightly has it among others."""

from __future__ import annotations

import os
import subprocess

import pytest

from lightswitch.doctor.examination import Listener, reach
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


@pytest.mark.parametrize(("main_address", "is_reached"), [("127.1", True), ("localhost", False), ("127.0.0.1", False)])
def test_rank_0_is_reached_by_its_name_also_where_its_own_hosts_file_names_the_loopback(
    main_address: str, is_reached: bool
) -> None:
    """127.1 is resolved like a host's name, to the loopback; 127.0.0.2 is another address of this machine."""
    host, port = Listener(main_address).address
    assert host == (main_address if is_reached else "127.0.0.1")
    assert (reach({"other": ("127.0.0.2", port)})["other"] == "") == is_reached
