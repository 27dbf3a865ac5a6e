"""The doctor among several processes."""

from __future__ import annotations

from tests.engine.doctor.test_doctor import DOCTOR, asked_of


def test_two_processes_are_measured_and_told_of_once() -> None:
    asked = asked_of("-m", "torch.distributed.run", "--nproc-per-node=2", *DOCTOR)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert asked.stdout.count("gloo, 16 MiB: ") == 1
    assert asked.stdout.startswith("processes   2, rendezvous at ")


def test_a_rank_that_does_not_come_is_a_problem(port: str) -> None:
    exported = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}
    asked = asked_of("-m", "lightswitch.doctor", "--timeout", "1", **exported)
    assert asked.returncode == 1
    assert asked.stdout.endswith("problem     rank 1 did not join within 1 s\n")
